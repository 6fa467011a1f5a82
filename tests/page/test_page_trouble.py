"""The page in a browser: errors, a lost connection, a server that asks for a key."""

from typing import Any

import pytest

from support.page_server import PageServer, Script

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")
from playwright.sync_api import expect


def ask(page: Any, question: str = "Who?") -> None:
    expect(page.get_by_label("Knowledge base")).to_be_visible()
    page.get_by_label("Your question").fill(question)
    page.keyboard.press("Enter")


def test_an_error_is_shown_as_the_api_says_it(page: Any, script: Script) -> None:
    script.error = "the prompt has 9,120 tokens, but the model takes at most 8,192"
    ask(page)
    failure = page.locator(".result").get_by_role("alert")
    expect(failure).to_contain_text(script.error)
    script.error = None
    failure.get_by_role("button", name="Ask again").click()
    expect(page.locator(".answer-text")).to_have_text("walnut")


def test_an_answer_cut_short_is_no_answer(page: Any, script: Script) -> None:
    script.answer, script.cut_after = "walnut and more", 2
    ask(page)
    expect(page.locator(".answer-text")).to_have_text("walnut and ")
    expect(page.locator(".result").get_by_role("alert")).to_contain_text("What is above may be incomplete.")
    expect(page.locator(".source")).to_have_count(0)


def test_a_lost_connection_is_said_and_found_again(page: Any, server: PageServer) -> None:
    ask(page)
    expect(page.locator(".answer-text")).to_have_text("walnut")
    server.stop()
    ask(page, "Still there?")
    notice = page.locator("#notice")
    expect(notice).to_contain_text("No connection to the server.")
    expect(page.locator(".result").get_by_role("alert")).to_contain_text("lost before an answer came")
    notice.get_by_role("button", name="Try now").click()
    expect(notice).to_contain_text("No connection to the server.")
    server.start()
    expect(notice).to_be_hidden()  # without a click
    expect(page.locator("#announcer")).to_have_text("Connected again.")
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".answer-text")).to_have_text("walnut")


def test_a_list_that_could_not_be_loaded_comes_when_the_server_does(page: Any, server: PageServer) -> None:
    expect(page.get_by_label("Knowledge base")).to_be_visible()
    server.stop()
    page.get_by_role("link", name="Knowledge bases").click()
    expect(
        page.get_by_role("alert").filter(has_text="The connection to the server was lost.")
    ).to_be_visible()
    server.start()
    expect(page.get_by_role("link", name="handbook")).to_be_visible()


def test_an_upload_without_connection_fails_by_file(page: Any, server: PageServer) -> None:
    page.goto(server.url + "#/kb/minutes")
    expect(page.get_by_text("None yet.")).to_be_visible()
    server.stop()
    page.locator("#files").set_input_files({"name": "may.md", "mimeType": "text/plain", "buffer": b"We met."})
    expect(page.locator(".upload.failed")).to_contain_text("The connection was lost. Add this file again.")


def test_a_key_is_asked_for_once_and_kept_in_the_tab(page: Any, server: PageServer, script: Script) -> None:
    script.key = "secret"
    page.goto(server.url + "?again#/kb")
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_have_count(1)
    dialog.get_by_label("Key", exact=True).fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_have_text("Incorrect API key provided")
    dialog.get_by_label("Key", exact=True).fill("secret")
    dialog.get_by_role("button", name="Use this key").click()
    expect(page.get_by_role("link", name="handbook")).to_be_visible()
    page.reload()
    expect(page.get_by_role("link", name="handbook")).to_be_visible()
    expect(dialog).to_have_count(0)
    page.goto(server.url + "#/kb/minutes")
    page.locator("#files").set_input_files({"name": "may.md", "mimeType": "text/plain", "buffer": b"We met."})
    expect(page.locator(".documents .row")).to_have_count(1)
    assert page.evaluate("localStorage.length") == 0


def test_without_a_key_the_refusal_is_shown(page: Any, server: PageServer, script: Script) -> None:
    script.key = "secret"
    page.goto(server.url + "?again#/settings")
    page.get_by_role("dialog", name="API key").get_by_role("button", name="Close").click()
    expect(page.locator("main").get_by_role("alert")).to_contain_text("You did not provide an API key")

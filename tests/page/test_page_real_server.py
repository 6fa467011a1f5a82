"""The page in a browser against kvweave's own server and the shipped model."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (extra `serve`)")
pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")
from playwright.sync_api import expect

from kvweave.samples import DOCUMENTS, sample_questions
from support.running_server import server


def test_upload_ask_open_a_source_and_delete(browser: Any, tmp_path: Path) -> None:
    (known,) = (each for each in sample_questions() if "Glorric" in each.text)
    documents = sorted(path for path in DOCUMENTS.iterdir() if path.suffix in (".md", ".txt"))
    binary = tmp_path / "sound.bin"
    binary.write_bytes(bytes(200))
    with server(tmp_path / "home") as running:
        page = browser.new_context().new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
        page.set_default_timeout(60_000)
        page.goto(running.url + "/#/kb")
        page.get_by_label("New knowledge base").fill("notes")
        page.keyboard.press("Enter")
        page.locator("#files").set_input_files([*documents, binary])
        expect(page.locator(".documents .row")).to_have_count(len(documents), timeout=120_000)
        expect(page.locator(".upload.failed")).to_have_count(1)

        page.get_by_role("link", name="Ask", exact=True).click()
        expect(page.get_by_label("Knowledge base")).to_have_value("notes")
        page.get_by_label("Your question").fill(known.text)
        page.keyboard.press("Enter")
        expect(page.locator(".answer-text")).to_have_text(known.answer, timeout=60_000)
        page.get_by_role("button", name="Show the tokens").click()
        expect(page.locator(".token.o-fresh").first).to_be_visible(timeout=60_000)
        text = "".join(page.locator(".token").all_text_contents())
        assert known.text in text
        page.locator(".source", has=page.locator("mark")).first.click()
        expect(page.get_by_role("dialog").locator("mark")).to_have_text(known.answer)
        page.keyboard.press("Escape")
        page.get_by_label("Your question").fill(known.text)
        page.keyboard.press("Enter")
        expect(page.locator(".cached")).to_contain_text("From the answer cache.")

        page.get_by_role("link", name="Caches").click()
        expect(page.locator(".figure", has_text="Answers given")).to_contain_text("1")
        page.goto(running.url + "/#/kb/notes")
        page.get_by_role("button", name="Delete passwords.md").click()
        page.get_by_role("button", name="Delete document").click()
        expect(page.locator(".documents .row")).to_have_count(len(documents) - 1)
        page.context.close()
    assert problems == []

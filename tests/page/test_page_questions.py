"""The page in a browser: questions, their answers and sources, and what was computed for them."""

import re
import threading
import time
from typing import Any

import pytest

from support.page_server import PageServer, Script, plan

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")
from playwright.sync_api import expect

QUESTION = "What is the password of Glorric?"


def ask(page: Any, question: str = QUESTION) -> None:
    expect(page.get_by_label("Knowledge base")).to_have_value("handbook")
    page.get_by_label("Your question").fill(question)
    page.keyboard.press("Enter")


def test_an_answer_streams_in(page: Any, script: Script) -> None:
    script.answer = "walnut is what the note says"
    last = script.last_piece = threading.Event()
    ask(page)
    answer = page.locator(".answer-text")
    expect(answer).to_have_text("walnut is what the note")  # it is not held back until the end
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    last.set()
    expect(answer).to_have_text(script.answer)
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_visible()
    expect(page.get_by_role("heading", name=QUESTION)).to_be_visible()
    assert script.asked == [{"question": QUESTION, "stream": True}]
    expect(page.locator("#announcer")).to_have_text(f"Answer: {script.answer}")


def test_stop_ends_an_answer(page: Any, script: Script) -> None:
    script.answer, script.piece_s = " ".join(["word"] * 200), 0.05
    ask(page)
    expect(page.locator(".answer-text")).to_have_text(re.compile("word word"))
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped.").first).to_be_visible()
    assert page.locator(".answer-text").inner_text().count("word") < 200
    script.piece_s, script.answer = 0, "walnut"
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".answer-text")).to_have_text("walnut")


def test_a_source_opens_with_its_passage_marked(page: Any, script: Script) -> None:
    ask(page)
    sources = page.get_by_role("complementary", name="Sources").get_by_role("button")
    expect(sources).to_have_count(5)
    expect(sources.first.locator("mark")).to_have_text("walnut")
    sources.first.click()
    dialog = page.get_by_role("dialog", name="1. passwords.md")
    text = script.bases["handbook"]["passwords.md"]
    start = text.index("\n\n") + 2
    expect(dialog.get_by_role("group", name="Passage")).to_have_text(text[start:].strip())
    expect(dialog.locator(".around").first).to_have_text(text[:start].strip())
    expect(dialog.get_by_role("group", name="Passage").locator("mark")).to_have_text("walnut")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(sources.first).to_be_focused()


def test_a_cached_answer_says_so_and_can_be_computed_again(page: Any, script: Script) -> None:
    script.cached = True
    ask(page)
    expect(page.locator(".cached")).to_contain_text("From the answer cache.")
    expect(page.locator(".cached")).to_contain_text("“What is Glorric's password?” was answered 21 min ago")
    expect(page.get_by_role("region", name="Prompt")).to_have_count(0)
    page.get_by_role("button", name="Compute it again").click()
    expect(page.get_by_role("region", name="Prompt")).to_be_visible()
    assert script.asked[-1]["cache"] == "refresh"


def test_a_cached_answer_of_another_question_can_be_rejected(page: Any, script: Script) -> None:
    script.cached = True
    ask(page)
    page.get_by_role("button", name="Not what I asked").click()
    expect(page.get_by_role("region", name="Prompt")).to_be_visible()
    assert script.rejected == [script.asked[0]["question"]]
    assert script.asked[-1].get("cache") != "refresh"


def test_time_is_compared_with_full_prefill(page: Any) -> None:
    ask(page)
    time_panel = page.get_by_role("region", name="Time")
    expect(time_panel.locator(".lead")).to_have_text(
        "First token after 324 ms. Full prefill would have taken about 1.33 s, 4.1 times as long."
    )
    with_reuse, full = (bar.bounding_box() for bar in time_panel.locator(".time-bar").all())
    widths = [
        segment.bounding_box()["width"]
        for segment in time_panel.locator(".time-bar").first.locator("span").all()
    ]
    assert len(widths) == 7
    assert sum(widths) / full["width"] == pytest.approx(0.561 / 1.576, abs=0.03)  # one scale for both
    for stage in ("Retrieve", "Tokenize", "Match", "Place", "Select", "Recompute", "Decode", "Full prefill"):
        expect(time_panel.locator(".stage-name", has_text=re.compile(f"^{stage}"))).to_be_visible()
    assert with_reuse["y"] < full["y"]


def test_tokens_show_origin_and_score_to_pointer_and_keys(page: Any, script: Script) -> None:
    ask(page)
    counts = plan(script.bases["handbook"], QUESTION)
    panel = page.get_by_role("region", name="Prompt")
    expect(panel.locator(".legend li").nth(2)).to_contain_text(f"{counts['recomputed_tokens']}")
    panel.get_by_role("button", name="Show the tokens").click()
    tokens = panel.locator(".token")
    expect(tokens).to_have_count(
        sum(counts[f"{origin}_tokens"] for origin in ("exact", "reused", "recomputed", "fresh"))
    )
    expect(panel.locator(".token.o-recomputed")).to_have_count(counts["recomputed_tokens"])
    expect(panel.locator(".note")).to_have_count(0)  # the map is of the run that answered
    expect(panel.locator(".token-head").nth(1)).to_contain_text("1. passwords.md")

    panel.locator(".token.o-recomputed").first.hover()
    expect(panel.locator(".tip")).to_contain_text("recomputed")
    expect(panel.locator(".tip")).to_contain_text("score 0.")
    page.mouse.move(2, 2)
    expect(panel.locator(".tip")).to_be_hidden()

    panel.get_by_role("button", name="Hide the tokens").focus()
    page.keyboard.press("Tab")
    expect(panel.get_by_role("application")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(panel.get_by_role("status")).to_have_text("the, exact, token 2")
    page.keyboard.press("ArrowDown")
    expect(panel.get_by_role("status")).to_have_text(
        re.compile(r"(reused|recomputed), score 0\.\d+, token \d+$")
    )
    page.keyboard.press("End")
    expect(panel.locator(".tip")).to_contain_text("fresh")


def test_a_long_prompt_is_drawn_quickly(page: Any, script: Script) -> None:
    script.map_tokens = 32_000
    ask(page)
    page.get_by_role("button", name="Show the tokens").click()
    began = time.monotonic()
    expect(page.locator(".token").first).to_be_visible()
    first_s = time.monotonic() - began
    expect(page.locator(".token")).to_have_count(32_000, timeout=15_000)
    expect(page.locator(".note")).to_contain_text("run again")
    page.locator(".tokens").focus()
    began = time.monotonic()
    page.keyboard.press("End")
    expect(page.locator(".tip")).to_contain_text("token 32,000 of 32,000")
    assert first_s < 5
    assert time.monotonic() - began < 5


def test_options_go_with_the_request(page: Any, script: Script) -> None:
    page.get_by_role("button", name="Options").click()
    expect(page.get_by_label("Recipe")).to_have_attribute("placeholder", "prophetkv")
    page.get_by_label("Recipe").fill("full")
    page.get_by_label("Ratio").fill("0.3")
    page.get_by_label("Chunks").fill("4")
    page.get_by_label("Answer cache").select_option("off")
    ask(page)
    expect(page.locator(".answer-text")).to_have_text("walnut")
    assert script.asked[-1] == {
        "question": QUESTION, "stream": True, "recipe": "full", "ratio": 0.3, "top_k": 4, "cache": "off",
    }  # fmt: skip


def test_what_documents_and_answers_contain_is_text(page: Any, script: Script) -> None:
    attack = '<img src=x onerror="document.title=\'taken\'"><script>document.title="taken"</script>'
    script.bases["handbook"] = {f"{attack}.md": f"The answer is {attack}."}
    script.answer = f"It is {attack}"
    ask(page, f"Is it {attack}?")
    expect(page.locator(".answer-text")).to_have_text(script.answer)
    expect(page.locator(".source")).to_contain_text(attack)
    page.locator(".source").click()
    expect(page.get_by_role("dialog")).to_contain_text(attack)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Show the tokens").click()
    expect(page.locator(".token").first).to_be_visible()
    page.goto(page.url.split("#")[0] + "#/kb/handbook")
    expect(page.locator(".row-name")).to_contain_text(attack)
    assert page.locator("main img, main script").count() == 0
    assert page.title() != "taken"


def test_a_question_survives_a_look_at_another_view(page: Any, server: PageServer) -> None:
    ask(page)
    expect(page.locator(".answer-text")).to_have_text("walnut")
    page.get_by_role("link", name="Settings").click()
    page.get_by_label("Find a setting").fill("cosine")
    expect(page.locator(".setting:visible")).to_have_count(1)
    page.get_by_role("link", name="Ask", exact=True).click()
    expect(page.locator(".answer-text")).to_have_text("walnut")

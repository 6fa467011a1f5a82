"""The page in a browser: knowledge bases, uploads, deletions, caches and settings."""

import re
from pathlib import Path
from typing import Any

import pytest

from support.page_server import PageServer, Script

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")
from playwright.sync_api import expect


def dropped(page: Any, names: dict[str, str]) -> None:
    """Drop files of these names and texts on the drop area."""
    transfer = page.evaluate_handle(
        """names => {
          const transfer = new DataTransfer();
          for (const [name, text] of Object.entries(names)) transfer.items.add(new File([text], name));
          return transfer;
        }""",
        names,
    )
    for event in ("dragenter", "dragover", "drop"):
        page.dispatch_event(".drop", event, {"dataTransfer": transfer})


def test_create_and_delete_a_knowledge_base(page: Any, server: PageServer, script: Script) -> None:
    page.goto(server.url + "#/kb")
    page.get_by_label("New knowledge base").fill("not a name")
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("alert")).to_contain_text(["is no name of a knowledge base"])
    page.get_by_label("New knowledge base").fill("notes")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="notes")).to_be_visible()
    assert "notes" in script.bases

    page.get_by_role("button", name="Delete knowledge base").click()
    dialog = page.get_by_role("dialog", name="Delete notes?")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    dialog.get_by_role("button", name="Cancel").click()
    assert "notes" in script.bases
    page.get_by_role("button", name="Delete knowledge base").click()
    dialog.get_by_role("button", name="Delete knowledge base").click()
    expect(page.get_by_role("heading", name="Knowledge bases")).to_be_visible()
    expect(page.get_by_role("link", name="handbook")).to_be_visible()
    expect(page.get_by_role("link", name="notes")).to_have_count(0)
    assert "notes" not in script.bases


def test_dropped_files_show_progress_and_what_became_of_each(
    page: Any, server: PageServer, script: Script
) -> None:
    script.piece_s, script.unreadable = 0.5, "sealed"
    page.goto(server.url + "#/kb/minutes")
    expect(page.get_by_text("None yet.")).to_be_visible()
    dropped(page, {"may.md": "We met in May.", "june.md": "We met in June.", "sealed.pdf": "?"})
    expect(page.locator(".upload-status").first).to_have_text(re.compile("^Reading, [0-3] of 3"))
    expect(page.locator(".upload-status").first).to_have_text(re.compile("^Computing KV, [1-3] of 4"))
    assert 0.2 < page.locator(".upload progress").first.evaluate("meter => meter.value") < 1
    expect(page.locator(".upload", has_text="may.md")).to_contain_text("Added")
    expect(page.locator(".upload", has_text="sealed.pdf")).to_contain_text(
        "the PDF is encrypted; remove its password first"
    )
    expect(page.locator(".documents .row")).to_have_count(2)
    assert script.bases["minutes"] == {"may.md": "We met in May.", "june.md": "We met in June."}
    expect(page.locator("#announcer")).to_have_text("1 file could not be added.")


def test_chosen_files_come_in_batches_and_go_on_in_the_background(
    page: Any, server: PageServer, script: Script, tmp_path: Path
) -> None:
    paths = [tmp_path / f"note {number}.txt" for number in range(20)]
    for path in paths:
        path.write_text(path.name)
    script.piece_s = 0.02
    page.goto(server.url + "#/kb/minutes")
    page.locator("#files").set_input_files(paths)
    page.get_by_role("link", name="Settings").click()
    expect(page.locator(".setting").first).to_be_visible()
    page.go_back()
    expect(page.locator(".documents .row")).to_have_count(20)
    assert script.bases["minutes"] == {path.name: path.name for path in paths}
    page.locator("#files").set_input_files(paths[0])
    expect(page.locator(".upload").first).to_contain_text("Already there")


def test_delete_a_document(page: Any, server: PageServer, script: Script) -> None:
    page.goto(server.url + "#/kb/handbook")
    rows = page.locator(".documents .row")
    expect(rows).to_have_count(16)
    page.get_by_role("button", name="Delete ferry.txt").click()
    page.get_by_role("button", name="Delete document").click()
    expect(rows).to_have_count(15)
    assert "ferry.txt" not in script.bases["handbook"]

    del script.bases["handbook"]["garden.md"]  # another client was faster
    page.get_by_role("button", name="Delete garden.md").click()
    page.get_by_role("button", name="Delete document").click()
    expect(page.get_by_role("alert").filter(has_text="there is no document 'garden.md'")).to_be_visible()


def test_caches_and_settings(page: Any, server: PageServer) -> None:
    page.goto(server.url + "#/caches")
    expect(page.locator(".figure").first).to_contain_text("1.3 GB")
    expect(page.locator(".figure").last).to_contain_text("9 of 35 questions")
    expect(page.get_by_role("img", name="Hit rates over time")).to_have_accessible_name(
        "Hit rates over time. Over the last ten questions at most: Prompt not computed 93 %, Answered from the cache 40 %."
    )
    page.get_by_text("As a table").click()
    expect(page.locator(".as-table tbody tr")).to_have_count(40)
    expect(page.locator(".predicted li").first).to_contain_text("answer given 3 times")
    expect(page.locator(".tier", has_text="Memory")).to_contain_text("412 MB of 512 MB")

    page.goto(server.url + "#/settings")
    expect(page.locator(".setting", has_text="recipe").first).to_contain_text("prophetkv default reuse")
    page.get_by_label("Changed only").check()
    expect(page.locator(".setting:visible")).to_have_count(2)

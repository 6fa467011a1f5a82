"""The page in a browser: keyboard alone, colours, phones, names for screen readers, contrast."""

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from support.page_server import PAGE, PageServer, Script

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")
pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed (extra `dev`)")
from playwright.sync_api import expect

VIEWS = ("ask", "kb", "kb/handbook", "caches", "settings")
AXE = files("axe_playwright_python") / "axe.min.js"
"""axe-core, for the browser; the package's own few lines are not used."""
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
BACKGROUND = "() => getComputedStyle(document.body).backgroundColor"


def show(page: Any, server: PageServer, view: str) -> None:
    """Show a view, filled: of questions, one with an answer and its tokens."""
    page.goto(f"{server.url}#/{view}")
    expect(page.locator("#server-state")).to_have_text(re.compile(r"\S"))  # the model's name comes by itself
    if view != "ask":
        expect(page.locator(".loading")).to_have_count(0)
        return
    expect(page.get_by_label("Knowledge base")).to_have_value("handbook")
    page.get_by_label("Your question").fill("What is the password of Glorric?")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Show the tokens").click()
    expect(page.locator(".token").first).to_be_visible()


@pytest.mark.parametrize("view", VIEWS)
def test_everybody_can_read_and_use_a_view(page: Any, server: PageServer, view: str) -> None:
    """Contrast, axe-core's rules, names for screen readers, and a phone, on one page that is filled once."""
    page.emulate_media(reduced_motion="reduce")  # no colour is on its way to another when it is read
    show(page, server, view)
    page.mouse.move(0, 0)
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate(CONTRAST)
        assert found["checked"] > 15
        assert found["low"] == [], scheme
    assert violations(page) == []
    check_names(page)
    check_phone(page)


def violations(page: Any) -> list[tuple[str, list[str]]]:
    """What axe-core finds wrong: the rule, and the elements that break it."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert len(found["passes"]) > 15
    return [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found["violations"]]


def test_axe_finds_nothing_in_dialogs_and_trouble(page: Any, server: PageServer) -> None:
    page.emulate_media(reduced_motion="reduce", color_scheme="dark")
    page.set_viewport_size({"width": 360, "height": 740})
    show(page, server, "ask")
    page.locator(".source").first.click()
    expect(page.get_by_role("dialog", name="1. passwords.md")).to_be_visible()
    assert violations(page) == []
    page.goto(f"{server.url}#/kb/handbook")  # as the Back button does
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_role("button", name="Delete badges.txt").click()
    server.stop()
    page.get_by_role("dialog").get_by_role("button", name="Delete document").click()
    expect(page.locator("#notice")).to_contain_text("No connection to the server.")
    assert violations(page) == []


def check_names(page: Any) -> None:
    """Check that every control has a name, and the page one heading and no id twice."""
    controls = (
        page.locator("a, button, input, select, textarea, meter, progress, [tabindex='0']")
        .filter(visible=True)
        .all()
    )
    assert len(controls) > 8
    for control in controls:
        expect(control).to_have_accessible_name(re.compile(r"\S"))
    assert page.locator("h1").filter(visible=True).count() == 1
    assert page.locator("[id]").evaluate_all("all => all.length === new Set(all.map(one => one.id)).size")


def check_phone(page: Any) -> None:
    """Check that a phone needs no sideways scrolling, and that a thumb hits what it aims at."""
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    tabs = page.get_by_role("navigation", name="Main")
    assert tabs.bounding_box()["y"] > 640  # at the thumb
    small = [
        each.evaluate("one => one.outerHTML")
        for each in page.locator("button, nav a, .input").filter(visible=True).all()
        if (box := each.bounding_box()) and min(box["width"], box["height"]) < 24  # WCAG 2.2, 2.5.8
    ]
    assert small == []


def test_the_keyboard_alone_is_enough(page: Any, server: PageServer, script: Script) -> None:
    page.goto(server.url + "?again#/kb")
    expect(page.get_by_role("link", name="handbook")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("/")  # to the question box, from anywhere
    expect(page.get_by_label("Your question")).to_be_focused()
    expect(page.get_by_label("Knowledge base")).to_have_value("handbook")
    page.keyboard.type("What is the password of Glorric?")
    page.keyboard.press("Enter")
    expect(page.locator(".answer-text")).to_have_text("walnut")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Your question")).to_have_value("What is the password of Glorric?")

    tab_to(page, page.locator(".source").first)
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="1. passwords.md")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".source").first).to_be_focused()

    page.goto(server.url + "#/kb/handbook")
    tab_to(page, page.get_by_role("button", name="Delete badges.txt"))
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".documents .row")).to_have_count(15)
    assert "badges.txt" not in script.bases["handbook"]
    tab_to(page, page.locator("#files"), back=True)
    assert page.locator(".drop").evaluate("drop => getComputedStyle(drop).outlineStyle") == "solid"


def tab_to(page: Any, target: Any, back: bool = False) -> None:
    """Press Tab until the focus is there; each stop on the way must show it."""
    target.wait_for(state="attached")
    for _ in range(60):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        if target.evaluate("one => one === document.activeElement"):
            return
    pytest.fail("Tab does not lead there")


def test_colours_follow_the_system_and_the_switch(page: Any) -> None:
    switch = page.get_by_role("button", name="Dark colours")
    light = page.evaluate(BACKGROUND)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(BACKGROUND)
    assert dark != light
    expect(switch).to_have_attribute("aria-pressed", "true")
    switch.click()
    assert page.evaluate(BACKGROUND) == light
    expect(switch).to_have_attribute("aria-pressed", "false")
    page.reload()
    assert page.evaluate(BACKGROUND) == light  # the choice stays
    switch.click()
    assert page.evaluate(BACKGROUND) == dark
    page.emulate_media(color_scheme="light")
    assert page.evaluate(BACKGROUND) == light  # the switch agreed with the system, so the system leads again


def test_origins_differ_without_colour(page: Any, server: PageServer) -> None:
    """Each origin has a pattern or an underline of its own, and blue and amber differ in lightness as well."""
    show(page, server, "ask")
    looks = {
        origin: page.locator(f".token.o-{origin}").first.evaluate(
            "one => ['backgroundImage', 'boxShadow', 'textDecorationLine'].map(name => getComputedStyle(one)[name] !== 'none')"
        )
        for origin in ("exact", "reused", "recomputed", "fresh")
    }
    assert len({tuple(look) for look in looks.values()}) == 4


def test_nothing_moves_where_motion_is_unwanted(page: Any, server: PageServer) -> None:
    page.emulate_media(reduced_motion="reduce")
    page.goto(server.url + "#/kb/handbook")
    durations = page.evaluate(
        "() => [...document.querySelectorAll('*')].map(one => getComputedStyle(one).transitionDuration)"
    )
    assert set(durations) == {"0s"}


def test_nothing_is_parsed_as_html() -> None:
    """No file of the page hands a text to the HTML parser or to eval, or loads anything from elsewhere."""
    files = [path for path in PAGE.iterdir() if path.suffix in (".js", ".html", ".css")]
    assert len(files) > 15
    forbidden = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "https://",
    )
    found = [(path.name, word) for path in files for word in forbidden if word in path.read_text()]
    assert found == []
    page = (PAGE / "index.html").read_text()
    assert "style=" not in page
    assert " on" not in "".join(tag for tag in page.split("<") if " on" in tag.partition(">")[0])

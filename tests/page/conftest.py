"""A headless Chromium and a server for its pages; without one of them, tests of the page skip and say why."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from support.page_server import PageServer, Script, samples

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser. Not for the whole session: while it lives, its thread has a running event loop."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; install your system's package")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def script() -> Script:
    """What the server answers: one knowledge base with the sample documents, and an empty one."""
    return Script(bases={"handbook": samples(), "minutes": {}})


@pytest.fixture
def server(script: Script) -> Iterator[PageServer]:
    """The server."""
    server = PageServer(script)
    yield server
    server.stop()


@pytest.fixture
def page(browser: Any, server: PageServer) -> Iterator[Any]:
    """A page of its own, on a desktop in light colours; a test fails on any uncaught error or breach of the policy."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(10_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if "Security Policy" in said.text else None)
    page.goto(server.url)
    yield page
    context.close()
    assert problems == []

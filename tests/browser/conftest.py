"""A real Chromium on the real editor of a real server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.host import ROOT

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WINDOW = {"width": 1600, "height": 950}
START_MS = 120_000
# The server keeps settings from page to page, so each test says which ones it starts from.
SETTINGS = {
    # Else the first visit of all opens the template browser by itself, some time after the page has loaded.
    "Comfy.TutorialCompleted": True,
    "Comfy.VueNodes.Enabled": False,
    "Comfy.ColorPalette": "dark",
    "Comfy.Locale": "en",
    "QuantWM.LivePanel": True,
    "QuantWM.DefaultBackend": "auto",
}


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def settings() -> dict:
    """Settings of the editor in which `page` opens, beside `SETTINGS`; tests override this."""
    return {}


def open_editor(chromium: Browser, server, settings: dict) -> Page:
    """The editor with an empty graph in a fresh profile, with these settings beside `SETTINGS`."""
    page = chromium.new_context(viewport=WINDOW).new_page()
    page.request.post(f"{server.url}/settings", data=SETTINGS | settings)
    page.goto(server.url)
    # The editor opens with a graph of its own, which would replace what a test has loaded before it came.
    page.wait_for_function(
        "window.app?.extensionManager && app.canvas?.graph?.nodes.length"
        " && !!LiteGraph.registered_node_types.QuantWMApply",
        timeout=START_MS,
    )
    page.evaluate("app.graph.clear()")
    return page


@pytest.fixture
def open_page(chromium: Browser, server) -> Iterator[Callable[[dict], Page]]:
    """`open_editor` for one test, which may need several pages."""
    pages = []

    def open_with(settings: dict) -> Page:
        pages.append(open_editor(chromium, server, settings))
        return pages[-1]

    yield open_with
    for page in pages:
        page.context.close()


@pytest.fixture(scope="module", params=[False, True], ids=["classic", "nodes2"])
def shared_page(chromium: Browser, server, request) -> Iterator[Page]:
    """A page of each node renderer for all tests of a file: to open one takes longer than to load a graph."""
    page = open_editor(chromium, server, {"Comfy.VueNodes.Enabled": request.param})
    yield page
    page.context.close()


@pytest.fixture
def page(open_page: Callable[[dict], Page], settings: dict) -> Page:
    return open_page(settings)


@pytest.fixture
def screenshot(page: Page) -> Callable[[str], Path]:
    """Save a picture of the page as out/browser-<name>.png."""

    def save(name: str) -> Path:
        path = ROOT / "out" / f"browser-{name}.png"
        path.parent.mkdir(exist_ok=True)
        page.screenshot(path=path)
        return path

    return save

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


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser, server) -> Iterator[Page]:
    """The editor, loaded and with an empty graph, in a fresh profile."""
    context = chromium.new_context(viewport=WINDOW)
    page = context.new_page()
    # Else the first visit of all opens the template browser by itself, some time after the page has loaded.
    page.request.post(f"{server.url}/settings", data={"Comfy.TutorialCompleted": True})
    page.goto(server.url)
    page.wait_for_function(
        "!!(window.app?.extensionManager && app.canvas && LiteGraph.registered_node_types.QuantWMApply)",
        timeout=START_MS,
    )
    page.evaluate("app.graph.clear()")
    yield page
    context.close()


@pytest.fixture
def screenshot(page: Page) -> Callable[[str], Path]:
    """Save a picture of the page as out/browser-<name>.png."""

    def save(name: str) -> Path:
        path = ROOT / "out" / f"browser-{name}.png"
        path.parent.mkdir(exist_ok=True)
        page.screenshot(path=path)
        return path

    return save

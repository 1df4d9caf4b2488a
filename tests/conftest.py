"""What all tests share: the real host in this process, a real server, and the rules for skipping."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.host import ROOT, load_pack, start_host

TESTS = Path(__file__).resolve().parent
FOLDER_MARKERS = ("host", "browser")

torch.set_num_threads(min(2, os.cpu_count() or 1))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and skip what this machine lacks; a CI machine has to have a browser."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    no_browser = pytest.mark.skip(reason="needs Chromium: apt-get install chromium, or set CHROMIUM to its path")
    has_browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or os.environ.get("CI")
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in FOLDER_MARKERS:
            item.add_marker(folder)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if folder == "browser" and not has_browser:
            item.add_marker(no_browser)


@pytest.fixture(scope="session")
def host() -> ModuleType:
    """The pack as a package, with the real ComfyUI imported in this process."""
    start_host()
    return load_pack()


@pytest.fixture(scope="session")
def server() -> Iterator:
    """A real ComfyUI server with the pack (benchmarks.server.ComfyServer); its log stays in out/."""
    from support.server import comfy_server

    with comfy_server(log_path=ROOT / "out" / "test-server.log") as running:
        yield running

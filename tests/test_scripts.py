"""The commands of README, where they can be tried without doing their whole work."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from benchmarks.host import ROOT

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the scripts are bash")


def run(*command: str, **env: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **env}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(
    not (ROOT / ".venv" / "quantwm-setup.stamp").exists(), reason="set up by hand, not by scripts/setup"
)
def test_setup_is_instant_once_done():
    started = time.monotonic()
    result = run("scripts/setup")
    assert result.returncode == 0 and result.stdout == ""
    assert time.monotonic() - started < 1


def test_setup_says_what_is_wrong_with_comfyui_path():
    result = run("scripts/setup", COMFYUI_PATH="/nowhere")
    assert result.returncode == 1
    assert "/nowhere" in result.stderr and "unset it" in result.stderr


def test_unknown_part_is_refused_with_the_choice():
    result = run("scripts/test", "everything")
    assert result.returncode == 2
    assert "lint, unit, kernels, host, browser" in result.stderr

"""The demo as a newcomer runs it: one command, and what it leaves behind."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import av
from PIL import Image

from benchmarks.host import ROOT

FILES = {"demo.mp4", "frames.png", "memory.png", "summary.json", "demo-server.log"}


def test_demo_shows_what_two_bits_save(tmp_path):
    command = [sys.executable, "-m", "benchmarks.demo", "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.iterdir()} == FILES

    summary = json.loads((tmp_path / "summary.json").read_text())
    off, packed = summary["off"], summary["quantwm"]
    assert off["method"] == "off" and off["bytes_packed"] == 0
    assert packed["method"] == "quantwm" and packed["key_bits"] == packed["value_bits"] == 2
    assert packed["tokens"] == off["tokens"] and packed["bytes_bf16"] == off["bytes_bf16"]
    assert packed["ratio_resident"] >= 4.5
    assert off["seconds"] > 0 and packed["seconds"] > 0
    assert math.isfinite(summary["psnr"]) and summary["psnr"] > 20

    with av.open(str(tmp_path / "demo.mp4")) as video:
        assert len(list(video.decode(video=0))) == 36
    with Image.open(tmp_path / "memory.png") as chart:
        assert min(chart.size) >= 200
    lines = result.stdout.strip().splitlines()
    assert f"{packed['ratio_resident']:.1f}x smaller" in "\n".join(lines[-5:])
    assert any("tokens cached" in line for line in lines), "no progress while sampling"

"""The page of quality tables: every figure of the rows, where it comes from, and files of older runs too."""

import json
import math
import subprocess
import sys

from benchmarks.ablations import ABLATIONS, GRID
from benchmarks.host import ROOT
from benchmarks.quality_page import write_page


def row(**changes) -> dict:
    return {
        "method": "quantwm",
        "variant": "default",
        "series": "",
        "key_bits": 2,
        "value_bits": 2,
        "bits_per_element": 2.6108,
        "ratio_resident": 5.8,
        "psnr_mean": 41.27,
        "psnr_ci95": 1.22,
        "psnr_min": 34.71,
        "ssim_mean": 0.9961,
        "ssim_ci95": 0.0012,
        "flicker": 1.234,
        "revisit_psnr_mean": 34.2,
        "revisit_psnr_ci95": 0.5,
        "top1_shift": 0.0478,
        "logit_mse": 0.0696,
        "attention_error": 0.1339,
        "by_head": {"attention_error": [[0.01, 0.02], [0.3, 0.04]]},
        "seconds": 36.94,
        "encode_seconds": 4.5,
        "decode_seconds": 6.49,
        "psnr_each": [41.27],
    } | changes


def run(*rows: dict, **changes) -> dict:
    where = {"gpu": "NVIDIA H200", "cpu": "x86_64", "cores": 16, "torch": "2.11.0", "date": "2026-11-29"}
    return {
        "command": "benchmarks.quality",
        "environment": where | {"commit": "0123456789abcdef"},
        "arguments": "--worlds 24 --seeds 3 --ablations",
        "worlds": 24,
        "seeds": 3,
        "rows": list(rows),
    } | changes


def page(tmp_path, *documents: dict) -> str:
    write_page(tmp_path / "docs" / "quality.md", list(documents))
    return (tmp_path / "docs" / "quality.md").read_text(encoding="utf-8")


def test_figures_command_and_machine(tmp_path):
    text = page(tmp_path, run(row(), row(method="rtn", variant="rank 8", series="rank", psnr_ci95=math.nan)))
    assert "`python -m benchmarks.quality --worlds 24 --seeds 3 --ablations`: 24 worlds x 3 seeds; NVIDIA H200" in text
    assert "commit 0123456789ab\n" in text
    assert (
        "| `quantwm` | 2, 2 | 2.61 | 5.80x | 41.3 \u00b1 1.2 | 34.7 | 0.996 \u00b1 0.001 | 1.23 | 34.2 \u00b1 0.5 |"
        in text
    )
    assert "| 4.8 \u00b1 0.2 | 0.0696" in page(tmp_path, run(row(top1_shift_ci95=0.0021)))
    assert "| 4.8 | 0.0696 | 13.39 % | 4.50 | 6.49 | 36.9 |" in text
    methods, ablation = text.split("## Ablation: rank")
    assert "| `rtn` rank 8 | 2, 2 | 2.61 | 5.80x | 41.3 | 34.7 |" in ablation and "rank 8" not in methods
    assert "| `quantwm` | 1.0 | 2.0 | **30.0** | 4.0 |" in text.split("## Where the damage sits")[1]


def test_an_uncompressed_row_is_equal(tmp_path):
    text = page(tmp_path, run(row(method="off", key_bits=16, value_bits=16, psnr_mean=100.0, psnr_ci95=0.0)))
    assert "| `off` | 16, 16 | 2.61 | 5.80x | equal |" in text and "Where the damage" not in text


def test_several_runs_are_told_apart_and_old_files_can_be_read(tmp_path):
    old = json.loads((ROOT / "benchmarks" / "results" / "quality-cpu-rivals.json").read_text())
    text = page(tmp_path, run(row()), old)
    assert "| run | method |" in text and "| 2 | `rtn` |" in text
    assert "2. `python -m benchmarks.quality --worlds 12 --seeds 2`" in text and "no GPU" in text


def test_what_was_measured_again_takes_the_place_of_what_it_was(tmp_path):
    old, new = run(row(psnr_mean=41.0), row(method="rtn")), run(row(psnr_mean=42.0), row(series="rank"))
    methods, ablation = page(tmp_path, old, new).split("## Ablation: rank")
    assert "| 2 | `quantwm` | 2, 2 | 2.61 | 5.80x | 42.0" in methods and "| 1 | `rtn` |" in methods
    assert "| 1 | `quantwm` |" not in methods and "| 2 | `quantwm` |" in ablation


def test_the_command_writes_the_page_without_measuring(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(run(row())))
    command = [sys.executable, "-m", "benchmarks.quality", "--from", str(tmp_path / "rows.json")]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "--docs FILE" in refused.stderr
    target = tmp_path / "quality.md"
    done = subprocess.run([*command, "--docs", str(target)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) not in target.read_text(encoding="utf-8")


def test_ablations_are_distinct_and_complete():
    assert len({(v.method, v.name, v.series) for v in ABLATIONS}) == len(ABLATIONS)
    grid = [variant for variant in ABLATIONS if variant.series == GRID]
    assert len(grid) == len({variant.measured for variant in grid}) == 8
    assert all(variant.series for variant in ABLATIONS)

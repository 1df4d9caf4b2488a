"""What all benchmarks share: a table for people, JSON for machines, and where a figure was measured."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from pathlib import Path

import torch

from .host import ROOT


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", type=Path, metavar="FILE", help="also write rows, machine and versions to FILE")
    options.add_argument("--quick", action="store_true", help="a smaller run, under a minute on two cores")
    return options


def environment() -> dict:
    """Machine, versions and commit of a measurement."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "cpu": platform.processor() or platform.machine(),
        "cores": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
    }


def print_table(rows: list[dict], columns: list[str]) -> None:
    """Rows as an aligned plain-text table; floats with four significant digits."""
    cells = [columns] + [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip())


def document(command: str, rows: list[dict], **extra) -> dict:
    """The rows with their circumstances, as they are written to JSON."""
    return {"command": command, "environment": environment(), **extra, "rows": rows}


def write_json(path: Path | None, command: str, rows: list[dict], **extra) -> None:
    """Write the rows with their circumstances, if a path was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document(command, rows, **extra), indent=1) + "\n", encoding="utf-8")


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)

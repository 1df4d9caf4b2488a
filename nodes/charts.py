"""The chart of Cache Memory Stats: where the bytes are at the end of a run, and how they grew."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..quantwm_core.accounting import against_bf16, format_bytes
from .canvas import Box, Canvas, with_alpha

WIDTH, HEIGHT = 1280, 640
LEFT: Box = (24, 24, 736, 616)
RIGHT: Box = (752, 24, 1256, 616)
BAR = 38
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

BACKGROUND, PANEL, GRID = "#14161c", "#1c1f28", "#2f3440"
TEXT, MUTED, BF16, PACKED = "#eceef4", "#9ba3b5", "#6b7387", "#5b9cff"

# In the order in which they are stacked and listed: (key of the record, name on the chart, colour).
PARTS = (
    ("codes", "codes", "#5b9cff"),
    ("ids", "codebook ids", "#22c1dc"),
    ("centroids", "centroids", "#3ddc97"),
    ("scales", "scales", "#ffd24a"),
    ("zeros", "zero points", "#ff9f4a"),
    ("psac_c", "PSAC coefficients", "#b794ff"),
    ("psac_u", "PSAC basis", "#f77fb3"),
)
OTHER_COLORS = ("#e8655a", "#7fc8a9", "#d98cd9")
UNPACKED = ("not packed", "#8d96a9")
STATE = ("state between blocks", "#c9b37e")
WORKSPACE = ("workspace, one layer while read", "#454c5c")

EMPTY = (
    "Nothing sampled yet",
    "Connect `after` to the sampler's output, then run the graph.",
)


def chart_tensor(image: Image.Image) -> torch.Tensor:
    """IMAGE tensor [1, height, width, 3] in 0..1 of an RGB picture."""
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255.0)[None]


def memory_chart(record: dict[str, Any] | None, history: list[dict[str, Any]]) -> Image.Image:
    """Picture of a run's record (CacheHandle.record) and its growth block by block (CacheHandle.history)."""
    canvas = Canvas(WIDTH, HEIGHT, BACKGROUND)
    if record is None:
        canvas.box((24, 24, WIDTH - 24, HEIGHT - 24), PANEL, radius=14)
        canvas.text((WIDTH / 2, HEIGHT / 2 - 16), EMPTY[0], TEXT, size=26, anchor="mm")
        canvas.text((WIDTH / 2, HEIGHT / 2 + 24), EMPTY[1], MUTED, size=18, anchor="mm")
        return canvas.finished()
    canvas.box(LEFT, PANEL, radius=14)
    canvas.box(RIGHT, PANEL, radius=14)
    _draw_parts(canvas, record)
    _draw_growth(canvas, history)
    return canvas.finished()


def _segments(record: dict[str, Any]) -> list[tuple[str, str, int]]:
    """(name, colour, bytes) of everything that stays resident, without empty parts."""
    by_part = dict(record["bytes_by_part"])
    named = [(name, color, by_part.pop(key, 0)) for key, name, color in PARTS]
    extra = [(key, OTHER_COLORS[i % len(OTHER_COLORS)], count) for i, (key, count) in enumerate(by_part.items())]
    rest = [(*UNPACKED, record["bytes_unpacked"]), (*STATE, record["bytes_state"])]
    return [part for part in [*named, *extra, *rest] if part[2] > 0]


def _draw_parts(canvas: Canvas, record: dict[str, Any]) -> None:
    left, top, right = LEFT[0] + 28, LEFT[1] + 26, LEFT[2] - 28
    segments = _segments(record)
    full, resident = record["bytes_bf16"], sum(count for _, _, count in segments)
    workspace = record.get("bytes_workspace_peak", 0)
    pixels = (right - left) / max(full, resident + workspace, 1)

    canvas.text((left, top), "KV cache at the end of the run", MUTED, size=17)
    canvas.text((left, top + 30), against_bf16(record["ratio_resident"]), TEXT, size=58, weight=0.8)
    canvas.text((left, top + 106), f"{format_bytes(resident)} instead of {format_bytes(full)}", MUTED, size=19)

    y = top + 160
    canvas.box((left, y, left + full * pixels, y + BAR), BF16, radius=5)
    canvas.text((left + 12, y + BAR / 2), f"BF16  {format_bytes(full)}", TEXT, size=16, anchor="lm")
    y += BAR + 12
    end = _stack(canvas, segments, left, y, BAR, pixels)
    if workspace > 0:
        canvas.box((end + 2, y, end + 2 + workspace * pixels, y + BAR), WORKSPACE[1], radius=4, outline=MUTED)
    label = f"this run  {format_bytes(resident)}"
    start = end + workspace * pixels + 12
    if start + canvas.text_width(label, 16) <= right:
        canvas.text((start, y + BAR / 2), label, TEXT, size=16, anchor="lm")

    if not segments:
        return
    # The packed bar again, as wide as the panel, so that its parts can be told apart.
    canvas.polygon([(left, y + BAR), (end, y + BAR), (right, y + 84), (left, y + 84)], with_alpha("#ffffff", 0.05))
    y += 84
    _stack(canvas, segments, left, y, BAR, (right - left) / resident)
    legend = [(name, color, count, f"{100 * count / resident:.1f} %") for name, color, count in segments]
    if workspace > 0:
        legend.append((*WORKSPACE, workspace, ""))
    _legend(canvas, legend, left, right, y + 60)
    canvas.text((left, LEFT[3] - 34), _caption(record), MUTED, size=15)


def _stack(
    canvas: Canvas,
    segments: list[tuple[str, str, int]],
    left: float,
    top: float,
    height: float,
    pixels: float,
) -> float:
    """Draw the segments side by side; `pixels` is the width of a byte. Returns where the last one ends."""
    x = left
    for _, color, count in segments:
        canvas.box((x, top, x + count * pixels, top + height), color)
        x += count * pixels
    return x


def _legend(canvas: Canvas, entries: list[tuple[str, str, int, str]], left: float, right: float, top: float) -> None:
    column = (right - left) / 2
    for i, (name, color, count, share) in enumerate(entries):
        x, y = left + (i % 2) * (column + 12), top + 30 * (i // 2)
        canvas.box((x, y + 3, x + 13, y + 16), color, radius=3)
        canvas.text((x + 22, y + 9.5), name, TEXT, size=15, anchor="lm")
        numbers = f"{format_bytes(count)}   {share}" if share else format_bytes(count)
        canvas.text((x + column - 14, y + 9.5), numbers, MUTED, size=15, anchor="rm")


def _caption(record: dict[str, Any]) -> str:
    bits = "" if record["method"] == "off" else f" K{record['key_bits']}V{record['value_bits']}, {record['backend']}"
    caches = f" x {record['conditionings']} prompts" if record.get("conditionings", 1) > 1 else ""
    return (
        f"{record['method']}{bits};  "
        f"{record['layers']} layers x {record['heads']} heads x {record['head_dim']}{caches};  "
        f"{record['tokens']:,} tokens" + (f" in {record['blocks']} blocks" if record["blocks"] else "")
    )


def _draw_growth(canvas: Canvas, history: list[dict[str, Any]]) -> None:
    canvas.text((RIGHT[0] + 28, RIGHT[1] + 26), "Growth over blocks", MUTED, size=17)
    plot: Box = (RIGHT[0] + 96, RIGHT[1] + 122, RIGHT[2] - 34, RIGHT[3] - 74)
    if not history:
        canvas.text(
            ((plot[0] + plot[2]) / 2, (plot[1] + plot[3]) / 2),
            "no finished block",
            MUTED,
            size=17,
            anchor="mm",
        )
        return
    full = [0] + [entry["bytes_bf16"] for entry in history]
    resident = [0] + [entry["bytes_packed"] + entry["bytes_unpacked"] for entry in history]
    top = _axes(canvas, plot, max(*full, *resident, 1), len(history))

    def place(index: int, count: float) -> tuple[float, float]:
        return (
            plot[0] + (plot[2] - plot[0]) * index / len(history),
            plot[3] - (plot[3] - plot[1]) * count / top,
        )

    for values, color in ((full, BF16), (resident, PACKED)):
        points = [place(i, count) for i, count in enumerate(values)]
        canvas.polygon([*points, (points[-1][0], plot[3])], with_alpha(color, 0.22))
        canvas.line(points, color, width=3)
        canvas.dot(points[-1], 5, color)
    x = RIGHT[0] + 28
    for color, name, values in ((BF16, "BF16", full), (PACKED, "this run", resident)):
        canvas.box((x, RIGHT[1] + 66, x + 13, RIGHT[1] + 79), color, radius=3)
        label = f"{name} {format_bytes(values[-1])}"
        canvas.text((x + 22, RIGHT[1] + 72.5), label, TEXT, size=16, anchor="lm")
        x += 22 + canvas.text_width(label, 16) + 32


def _axes(canvas: Canvas, plot: Box, largest: float, blocks: int) -> float:
    """Grid, scales and titles. Returns the value at the upper edge of the plot."""
    unit = min(int(math.log(max(largest, 1), 1024)), len(UNITS) - 1)
    step = nice_step(largest / 1024**unit / 4)
    top = step * math.ceil(largest / 1024**unit / step - 1e-9)
    for i in range(round(top / step) + 1):
        y = plot[3] - (plot[3] - plot[1]) * i * step / top
        canvas.line([(plot[0], y), (plot[2], y)], GRID)
        label = f"{i * step:g} {UNITS[unit]}" if i else "0"
        canvas.text((plot[0] - 10, y), label, MUTED, size=15, anchor="rm")
    stride = max(1, round(nice_step(blocks / 6, (1, 2, 5, 10))))
    for block in range(0, blocks + 1, stride):
        x = plot[0] + (plot[2] - plot[0]) * block / blocks
        canvas.text((x, plot[3] + 10), str(block), MUTED, size=15, anchor="ma")
    canvas.text(((plot[0] + plot[2]) / 2, plot[3] + 38), "blocks", MUTED, size=15, anchor="ma")
    return top * 1024**unit


def nice_step(rough: float, factors: tuple[float, ...] = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)) -> float:
    """The smallest of the factors times a power of ten that is not below `rough`."""
    power = 10 ** math.floor(math.log10(rough))
    return next(factor * power for factor in factors if factor * power >= rough * (1 - 1e-9))

"""The chart of Compare Worlds: a curve over frames for each measure, and its total."""

from __future__ import annotations

import math
from dataclasses import dataclass

from PIL import Image

from ..quantwm_core.comparison import Comparison, in_decibels
from ..quantwm_core.picture_metrics import PSNR_CEILING
from .canvas import Box, Canvas, with_alpha
from .charts import BACKGROUND, GRID, MUTED, PANEL, TEXT, nice_step

WIDTH, HEIGHT = 1280, 560
MARGIN, GAP, HEADER = 24, 16, 68
LINES = 4
MOST_DOTS = 60


@dataclass(frozen=True)
class Curve:
    """One measure: its name and what is good, the total in words, and (frame from 1, value) of its frames.

    equal: frames that have no finite value.
    span: the least that the plot shows, so that rounding noise does not fill it; ends: values the plot must reach.
    """

    name: str
    hint: str
    total: str
    color: str
    points: list[tuple[int, float]]
    span: float
    ends: tuple[float, ...] = ()
    equal: tuple[int, ...] = ()


def comparison_chart(result: Comparison, names: tuple[str, str]) -> Image.Image:
    """Picture of a comparison; `names` are those of the reference and of what was compared with it."""
    canvas = Canvas(WIDTH, HEIGHT, BACKGROUND)
    title = f"{names[1]} against {names[0]}"
    canvas.text((MARGIN + 4, HEADER / 2 + 6), title, TEXT, size=24, anchor="lm", weight=0.4)
    canvas.text((WIDTH - MARGIN - 4, HEADER / 2 + 6), _caption(result), MUTED, size=16, anchor="rm")
    curves = _curves(result)
    width = (WIDTH - 2 * MARGIN - GAP * (len(curves) - 1)) / len(curves)
    for i, curve in enumerate(curves):
        left = MARGIN + i * (width + GAP)
        _draw_curve(canvas, (left, HEADER, left + width, HEIGHT - MARGIN), curve, len(result.ssim))
    return canvas.finished()


def _caption(result: Comparison) -> str:
    frames, (width, height) = len(result.ssim), result.size
    equal = sum(value >= PSNR_CEILING for value in result.psnr)
    return f"{frames} frames of {width} x {height}" + (f", {equal} of them equal" if equal else "")


def _curves(result: Comparison) -> list[Curve]:
    numbered = list(enumerate(result.psnr, 1))
    finite = [(frame, value) for frame, value in numbered if value < PSNR_CEILING]
    equal = tuple(frame for frame, value in numbered if value >= PSNR_CEILING)
    total = in_decibels(result.psnr_total)
    curves = [
        Curve("PSNR", "dB, higher is closer", total, "#5b9cff", finite, 4.0, equal=equal),
        Curve(
            "SSIM",
            "1 is equal",
            f"{result.ssim_mean:.4f}",
            "#3ddc97",
            list(enumerate(result.ssim, 1)),
            0.004,
            (1.0,),
        ),
        Curve(
            "Flicker",
            "of 255, lower is steadier",
            f"{result.flicker_mean:.2f}",
            "#ff9f4a",
            list(enumerate(result.flicker, 2)),
            0.5,
            (0.0,),
        ),
    ]
    if result.lpips_mean is not None:
        points = list(enumerate(result.lpips, 1))
        curves.append(Curve("LPIPS", "lower is closer", f"{result.lpips_mean:.4f}", "#b794ff", points, 0.004, (0.0,)))
    return curves


def _draw_curve(canvas: Canvas, panel: Box, curve: Curve, frames: int) -> None:
    left, top, right, bottom = panel
    canvas.box(panel, PANEL, radius=14)
    canvas.text((left + 22, top + 20), f"{curve.name}  ({curve.hint})", MUTED, size=16)
    canvas.text((left + 22, top + 46), curve.total, TEXT, size=42, weight=0.8)
    plot: Box = (left + 66, top + 122, right - 26, bottom - 60)
    if not curve.points:
        middle = ((plot[0] + plot[2]) / 2, (plot[1] + plot[3]) / 2)
        canvas.text(middle, "all frames are equal" if curve.equal else "needs two frames", MUTED, size=16, anchor="mm")
        return
    low, high = _axes(canvas, plot, curve, frames)

    def place(frame: int, value: float) -> tuple[float, float]:
        x = plot[0] + (plot[2] - plot[0]) * (frame - 1) / max(frames - 1, 1)
        return x, plot[3] - (plot[3] - plot[1]) * (value - low) / (high - low)

    for run in _runs(curve.points):
        points = [place(*point) for point in run]
        if len(points) > 1:
            canvas.polygon([(points[0][0], plot[3]), *points, (points[-1][0], plot[3])], with_alpha(curve.color, 0.18))
            canvas.line(points, curve.color, width=2.5)
        if len(points) <= MOST_DOTS:
            for point in points:
                canvas.dot(point, 3, curve.color)
    for frame in curve.equal:
        canvas.dot(place(frame, high), 2.5, MUTED)
    if curve.equal:
        canvas.text((plot[2], plot[1] - 12), "grey: equal", MUTED, size=14, anchor="rm")


def _runs(points: list[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """Points of consecutive frames together."""
    runs = [points[:1]]
    for before, point in zip(points, points[1:]):
        if point[0] == before[0] + 1:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _axes(canvas: Canvas, plot: Box, curve: Curve, frames: int) -> tuple[float, float]:
    """Grid, scales and title of the frame axis. Returns the values at the lower and upper edge."""
    values = [value for _, value in curve.points] + list(curve.ends)
    low, high = min(values), max(values)
    missing = max(0.0, curve.span - (high - low))
    # Room is made on the side where no end is fixed.
    if curve.ends and low in curve.ends:
        high += missing
    else:
        low -= missing
    step = nice_step((high - low) / LINES)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    for i in range(last - first + 1):
        y = plot[3] - (plot[3] - plot[1]) * i / (last - first)
        canvas.line([(plot[0], y), (plot[2], y)], GRID)
        canvas.text((plot[0] - 8, y), f"{(first + i) * step:.6g}", MUTED, size=14, anchor="rm")
    stride = max(1, round(nice_step(frames / 6, (1, 2, 5, 10))))
    for frame in sorted({1, *range(stride, frames + 1, stride)} if stride > 1 else range(1, frames + 1)):
        x = plot[0] + (plot[2] - plot[0]) * (frame - 1) / max(frames - 1, 1)
        canvas.text((x, plot[3] + 8), str(frame), MUTED, size=14, anchor="ma")
    canvas.text(((plot[0] + plot[2]) / 2, plot[3] + 30), "frame", MUTED, size=14, anchor="ma")
    return first * step, last * step

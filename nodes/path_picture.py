"""A camera path seen from above, as the preview of Camera Path."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from .canvas import Canvas, Point, with_alpha

SIZE, MARGIN, HEADER = 640, 64, 44
BACKGROUND, PANEL, GRID = "#14161c", "#1c1f28", "#2f3440"
TEXT, MUTED, START, END = "#eceef4", "#9ba3b5", "#3ddc97", "#f77fb3"
VIEWS = 12
# So much of the picture's width at least, so that a camera that hardly moves does not look like a journey.
SMALLEST_SPAN = 0.5


def path_picture(poses: np.ndarray, fov: float) -> Image.Image:
    """Picture of camera-to-world matrices `[F, 4, 4]` (x right, z up in the picture), with what the camera sees.

    Args:
        fov: horizontal angle of view in degrees, for the wedges.
    """
    canvas = Canvas(SIZE, SIZE, BACKGROUND)
    canvas.box((12, 12, SIZE - 12, SIZE - 12), PANEL, radius=14)
    ground = poses[:, [0, 2], 3]
    centre = (ground.max(axis=0) + ground.min(axis=0)) / 2
    span = max(float(np.ptp(ground, axis=0).max()), SMALLEST_SPAN)
    scale = (SIZE - 2 * MARGIN - HEADER) / (span * 1.35)
    middle = (SIZE / 2, (SIZE + HEADER) / 2)

    def place(point: np.ndarray) -> Point:
        x, z = (point - centre) * scale
        return middle[0] + x, middle[1] - z

    unit = 10.0 ** math.floor(math.log10(span))
    _draw_grid(canvas, unit * scale, place(np.zeros(2)))
    last = len(poses) - 1
    for index in sorted({round(i) for i in np.linspace(0, last, min(VIEWS, len(poses)))}):
        _draw_view(canvas, place(ground[index]), poses[index][:3, 2], fov, _blend(index / max(1, last)))
    if np.ptp(ground, axis=0).max() > 0:
        for i in range(last):
            canvas.line([place(ground[i]), place(ground[i + 1])], _blend(i / last), width=3)
    canvas.dot(place(ground[-1]), 6, END)
    canvas.dot(place(ground[0]), 6, START)
    canvas.text((28, 26), f"{len(poses)} frames, seen from above", TEXT, size=18)
    canvas.text((SIZE - 28, 28), f"grid {unit:g}", MUTED, size=14, anchor="ra")
    for x, color, word in ((28, START, "start"), (96, END, "end")):
        canvas.dot((x + 6, SIZE - 36), 6, color)
        canvas.text((x + 18, SIZE - 36), word, MUTED, size=14, anchor="lm")
    return canvas.finished()


def _draw_grid(canvas: Canvas, step: float, origin: Point) -> None:
    low, high = 24, SIZE - 24
    for x in _ticks(origin[0], step, low, high):
        canvas.line([(x, low + HEADER), (x, high)], GRID)
    for y in _ticks(origin[1], step, low + HEADER, high):
        canvas.line([(low, y), (high, y)], GRID)


def _ticks(origin: float, step: float, low: float, high: float) -> list[float]:
    first = math.ceil((low - origin) / step)
    return [origin + i * step for i in range(first, math.floor((high - origin) / step) + 1)]


def _draw_view(canvas: Canvas, at: Point, forward: np.ndarray, fov: float, color: str) -> None:
    """A wedge for what the camera sees, shorter the more it looks up or down."""
    heading, length = math.atan2(forward[0], forward[2]), 54 * math.hypot(forward[0], forward[2])
    edges = [heading + math.radians(turn) for turn in (-fov / 2, fov / 2)]
    corners = [(at[0] + length * math.sin(edge), at[1] - length * math.cos(edge)) for edge in edges]
    canvas.polygon([at, *corners], with_alpha(color, 0.22))


def _blend(share: float) -> str:
    """Colour between start and end."""
    ends = [[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in (START, END)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(*ends))

"""Draw assets/icon.png: a lit globe on a pixel grid in four shades, which is a world in 2 bits."""

from __future__ import annotations

import math
from pathlib import Path

from PIL import Image, ImageDraw

SIZE, CELLS, MARGIN, OVERSAMPLE = 400, 13, 34, 4
BACKGROUND = "#14151f"
SHADES = ("#2b2f55", "#4355b8", "#4f9dea", "#b9f2ff")
LIGHT = (-0.52, -0.60, 0.61)
ICON = Path(__file__).resolve().parent.parent / "assets" / "icon.png"


def shade(x: float, y: float) -> int | None:
    """Which of the four shades the unit sphere has at (x, y), None outside of it."""
    height = 1 - x * x - y * y
    if height <= 0:
        return None
    brightness = x * LIGHT[0] + y * LIGHT[1] + math.sqrt(height) * LIGHT[2]
    return min(3, max(0, round(3 * (brightness * 0.8 + 0.25))))


def main() -> None:
    scale = SIZE * OVERSAMPLE
    image = Image.new("RGBA", (scale, scale), (0, 0, 0, 0))
    draw = ImageDraw.Draw(image)
    draw.rounded_rectangle((0, 0, scale - 1, scale - 1), radius=scale // 6, fill=BACKGROUND)
    cell = (SIZE - 2 * MARGIN) * OVERSAMPLE / CELLS
    for row in range(CELLS):
        for column in range(CELLS):
            level = shade((column + 0.5) * 2 / CELLS - 1, (row + 0.5) * 2 / CELLS - 1)
            if level is not None:
                left, top = (MARGIN * OVERSAMPLE + cell * index for index in (column, row))
                box = (left + cell * 0.07, top + cell * 0.07, left + cell * 0.93, top + cell * 0.93)
                draw.rounded_rectangle(box, radius=cell * 0.22, fill=SHADES[level])
    ICON.parent.mkdir(exist_ok=True)
    image.resize((SIZE, SIZE), Image.Resampling.LANCZOS).save(ICON, optimize=True)


if __name__ == "__main__":
    main()

"""Draw assets/icon.png and banner.png: a lit globe on a pixel grid in four shades, which is a world in 2 bits."""

from __future__ import annotations

import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SIZE, CELLS, MARGIN, OVERSAMPLE = 400, 13, 34, 4
BACKGROUND = "#14151f"
SHADES = ("#2b2f55", "#4355b8", "#4f9dea", "#b9f2ff")
LIGHT = (-0.52, -0.60, 0.61)
BANNER_SIZE = (1050, 450)
ASSETS = Path(__file__).resolve().parent.parent / "assets"


def shade(x: float, y: float) -> int | None:
    """Which of the four shades the unit sphere has at (x, y), None outside of it."""
    height = 1 - x * x - y * y
    if height <= 0:
        return None
    brightness = x * LIGHT[0] + y * LIGHT[1] + math.sqrt(height) * LIGHT[2]
    return min(3, max(0, round(3 * (brightness * 0.8 + 0.25))))


def draw_globe(draw: ImageDraw.ImageDraw, left: float, top: float, size: float) -> None:
    """The globe, `size` pixels wide."""
    cell = size / CELLS
    for row in range(CELLS):
        for column in range(CELLS):
            level = shade((column + 0.5) * 2 / CELLS - 1, (row + 0.5) * 2 / CELLS - 1)
            if level is not None:
                x, y = left + cell * column, top + cell * row
                box = (x + cell * 0.07, y + cell * 0.07, x + cell * 0.93, y + cell * 0.93)
                draw.rounded_rectangle(box, radius=cell * 0.22, fill=SHADES[level])


def draw_icon() -> Image.Image:
    scale = SIZE * OVERSAMPLE
    image = Image.new("RGBA", (scale, scale), (0, 0, 0, 0))
    draw = ImageDraw.Draw(image)
    draw.rounded_rectangle((0, 0, scale - 1, scale - 1), radius=scale // 6, fill=BACKGROUND)
    draw_globe(draw, MARGIN * OVERSAMPLE, MARGIN * OVERSAMPLE, (SIZE - 2 * MARGIN) * OVERSAMPLE)
    return image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)


def draw_banner() -> Image.Image:
    """The globe and what the pack does, 21:9 as the registry asks for."""
    width, height = (side * OVERSAMPLE for side in BANNER_SIZE)
    image = Image.new("RGB", (width, height), BACKGROUND)
    draw = ImageDraw.Draw(image)
    globe = height * 0.68
    draw_globe(draw, height * 0.16, height * 0.16, globe)
    left = height * 0.32 + globe
    lines = (("QuantWM", 0.2, 0.3, SHADES[3]), ("world models in 2 bits", 0.082, 0.56, SHADES[2]))
    for words, size, top, color in lines:
        draw.text((left, height * top), words, color, ImageFont.load_default(height * size))
    return image.resize(BANNER_SIZE, Image.Resampling.LANCZOS)


def main() -> None:
    ASSETS.mkdir(exist_ok=True)
    draw_icon().save(ASSETS / "icon.png", optimize=True)
    draw_banner().save(ASSETS / "banner.png", optimize=True)


if __name__ == "__main__":
    main()

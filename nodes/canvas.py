"""A small drawing surface: drawn at twice the size and scaled down once, for smooth text and curves."""

from __future__ import annotations

from functools import lru_cache

from PIL import Image, ImageColor, ImageDraw, ImageFont

SCALE = 2

Point = tuple[float, float]
Box = tuple[float, float, float, float]


@lru_cache(maxsize=32)
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def text_width(text: str, size: float = 14) -> float:
    """Pixels that a line of text takes."""
    return _font(round(size * SCALE)).getlength(text) / SCALE


class Canvas:
    """Coordinates are pixels of the finished picture; colours are "#rrggbb" or "#rrggbbaa"."""

    def __init__(self, width: int, height: int, background: str) -> None:
        self.size = (width, height)
        self._image = Image.new("RGB", (width * SCALE, height * SCALE), background)
        # Drawing in mode RGBA on an RGB image blends translucent colours instead of replacing what is below.
        self._draw = ImageDraw.Draw(self._image, "RGBA")

    def box(self, box: Box, fill: str, radius: float = 0, outline: str | None = None) -> None:
        """Filled rectangle (left, top, right, bottom), with rounded corners where there is a radius."""
        left, top, right, bottom = (round(value * SCALE) for value in box)
        if right <= left or bottom <= top:
            return
        self._draw.rounded_rectangle(
            (left, top, right - 1, bottom - 1), radius * SCALE, fill=fill, outline=outline, width=SCALE
        )

    def polygon(self, points: list[Point], fill: str) -> None:
        self._draw.polygon([(x * SCALE, y * SCALE) for x, y in points], fill=fill)

    def line(self, points: list[Point], color: str, width: float = 1) -> None:
        self._draw.line(
            [(x * SCALE, y * SCALE) for x, y in points],
            fill=color,
            width=max(1, round(width * SCALE)),
            joint="curve",
        )

    def dot(self, center: Point, radius: float, fill: str) -> None:
        x, y = center
        self._draw.ellipse([(v * SCALE) for v in (x - radius, y - radius, x + radius, y + radius)], fill=fill)

    def text(
        self, position: Point, text: str, color: str, size: float = 14, anchor: str = "la", weight: float = 0
    ) -> None:
        """One line of text. `anchor` is Pillow's (la: left, top; rm: right, middle); `weight` thickens it."""
        self._draw.text(
            (position[0] * SCALE, position[1] * SCALE),
            text,
            fill=color,
            font=_font(round(size * SCALE)),
            anchor=anchor,
            stroke_width=weight * SCALE,
            stroke_fill=color,
        )

    def text_width(self, text: str, size: float = 14) -> float:
        return text_width(text, size)

    def finished(self) -> Image.Image:
        return self._image.resize(self.size, Image.Resampling.LANCZOS)


def with_alpha(color: str, alpha: float) -> str:
    red, green, blue = ImageColor.getrgb(color)[:3]
    return f"#{red:02x}{green:02x}{blue:02x}{round(alpha * 255):02x}"

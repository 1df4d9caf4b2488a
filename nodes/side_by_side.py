"""Two videos next to each other with their difference, one finished frame at a time."""

from __future__ import annotations

import math

import torch

from ..quantwm_core.comparison import in_decibels
from .canvas import Canvas, text_width
from .charts import BACKGROUND, MUTED, TEXT, chart_tensor

GAP = 4


class SideBySide:
    """Fills one IMAGE batch frame by frame: reference, compared, and |difference| times `gain`, under a line of text.

    Width and height are even, as video encoders want them.
    """

    def __init__(self, frames: int, width: int, height: int, names: tuple[str, str], gain: float) -> None:
        self._width, self._gain = width, gain
        self._text = min(28, max(11, width // 22))
        self._strip = 2 * self._text + height % 2
        self._columns = [column * (width + GAP) for column in range(3)]
        total = 3 * width + 2 * GAP
        self.images = torch.zeros(frames, height + self._strip, total + total % 2, 3)
        self._titles = self._draw_titles((*names, f"difference x {gain:g}"), (f"{frames} of {frames}", "99.99 dB", ""))

    def add(self, index: int, reference: torch.Tensor, compared: torch.Tensor, psnr: float) -> None:
        """Draw frame `index` from two frames `[H, W, 3]` in 0..1 and what PSNR they have."""
        frame = self.images[index]
        frame[: self._strip] = self._titles
        for left, number in zip(self._columns, (f"{index + 1} of {len(self.images)}", in_decibels(psnr))):
            self._write(frame, left + self._width - self._text // 2, number)
        difference = (compared - reference).abs().mul_(self._gain).clamp_(max=1)
        for left, picture in zip(self._columns, (reference, compared, difference)):
            frame[self._strip :, left : left + self._width] = picture

    def _draw_titles(self, names: tuple[str, ...], widest: tuple[str, ...]) -> torch.Tensor:
        """The strip above the pictures, `[strip, width, 3]`; room is left for the widest number of each column."""
        canvas = Canvas(self.images.shape[2], self._strip, BACKGROUND)
        for left, name, number in zip(self._columns, names, widest):
            room = self._width - 2 * self._text - text_width(number, self._text)
            while name and text_width(name, self._text) > room:
                name = name[:-1]
            canvas.text((left + self._text / 2, self._strip / 2), name, TEXT, size=self._text, anchor="lm")
        return chart_tensor(canvas.finished())[0]

    def _write(self, frame: torch.Tensor, right: int, number: str) -> None:
        """A number in the strip, ending at `right`. Only its own few pixels are drawn: there is one for every frame."""
        width = min(math.ceil(text_width(number, self._text)) + 1, right)
        canvas = Canvas(width, self._strip, BACKGROUND)
        canvas.text((width, self._strip / 2), number, MUTED, size=self._text, anchor="rm")
        frame[: self._strip, right - width : right] = chart_tensor(canvas.finished())[0]

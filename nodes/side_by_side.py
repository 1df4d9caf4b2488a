"""Two videos next to each other with their difference, one finished frame at a time."""

from __future__ import annotations

import torch

from ..quantwm_core.comparison import in_decibels
from .canvas import Canvas
from .charts import BACKGROUND, MUTED, TEXT, chart_tensor

GAP = 4


class SideBySide:
    """Fills one IMAGE batch frame by frame: reference, compared, and |difference| times `gain`, under a line of text.

    Width and height are even, as video encoders want them.
    """

    def __init__(self, frames: int, width: int, height: int, names: tuple[str, str], gain: float) -> None:
        self._width, self._height, self._gain = width, height, gain
        self._names = names
        self._text = min(28, max(11, width // 22))
        self._strip = 2 * self._text + height % 2
        self._columns = [column * (width + GAP) for column in range(3)]
        total = 3 * width + 2 * GAP
        self.images = torch.zeros(frames, height + self._strip, total + total % 2, 3)

    def add(self, index: int, reference: torch.Tensor, compared: torch.Tensor, psnr: float) -> None:
        """Draw frame `index` from two frames `[H, W, 3]` in 0..1 and what PSNR they have."""
        frame = self.images[index]
        frame[: self._strip] = self._title(index, psnr)
        difference = (compared - reference).abs().mul_(self._gain).clamp_(max=1)
        for left, picture in zip(self._columns, (reference, compared, difference)):
            frame[self._strip :, left : left + self._width] = picture

    def _title(self, index: int, psnr: float) -> torch.Tensor:
        canvas = Canvas(self.images.shape[2], self._strip, BACKGROUND)
        size, middle = self._text, self._strip / 2
        labels = (
            (self._names[0], f"{index + 1} of {len(self.images)}"),
            (self._names[1], in_decibels(psnr)),
            (f"difference x {self._gain:g}", ""),
        )
        for left, (name, number) in zip(self._columns, labels):
            canvas.text((left + size / 2, middle), self._fitting(canvas, name, number), TEXT, size=size, anchor="lm")
            canvas.text((left + self._width - size / 2, middle), number, MUTED, size=size, anchor="rm")
        return chart_tensor(canvas.finished())[0]

    def _fitting(self, canvas: Canvas, name: str, number: str) -> str:
        """The name, cut where it would meet the number or the next column."""
        room = self._width - 2 * self._text - canvas.text_width(number, self._text)
        while name and canvas.text_width(name, self._text) > room:
            name = name[:-1]
        return name

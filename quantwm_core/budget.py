"""A budget in bytes: which blocks of the history are stored in 2, 4 or 8 bits.

After WindowQuant (arXiv 2605.02262), which gives each window of visual tokens the bits that its similarity to the
prompt deserves. A rollout does not know when it packs a block who will look at it, and how much room others will need,
so the choice is not made once: a block is packed in the most bits, and when the cache has outgrown its budget, blocks
lose bits, the oldest first. Choosing by the attention that the newest block pays was tried and was worse on the tiny
world (benchmarks/NOTES.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .packing import repack
from .span import PackedSpan

if TYPE_CHECKING:
    from .layer_cache import LayerCache

logger = logging.getLogger(__name__)

Width = tuple[int, int]


@dataclass(frozen=True)
class Stored:
    """A span that may lose bits: its place among the entries, its tokens, and its width as a place in the ladder."""

    index: int
    tokens: int
    level: int


def choose_widths(spans: Sequence[Stored], ladder: Sequence[Width], per_bit: float, surplus: float) -> dict[int, Width]:
    """New widths, by place, that free `surplus` bytes or all there are to free.

    Steps down the ladder are taken where the squared error, which a bit less makes four times as large, grows least for
    the bytes that come free: all go to 4 bits before one goes to 2. Among equals the oldest goes first.

    Args:
        ladder: widths, fewest bits first.
        per_bit: bytes that one bit of keys, or of values, takes for one token.
    """
    levels = {span.index: span.level for span in spans}

    def price(span: Stored) -> float:
        lower, upper = ladder[levels[span.index] - 1], ladder[levels[span.index]]
        return (_error(lower) - _error(upper)) / (sum(upper) - sum(lower))

    while surplus > 0 and (open_spans := [span for span in spans if levels[span.index] > 0]):
        span = min(open_spans, key=price)
        levels[span.index] -= 1
        lower, upper = ladder[levels[span.index]], ladder[levels[span.index] + 1]
        surplus -= span.tokens * per_bit * (sum(upper) - sum(lower))
    return {span.index: ladder[levels[span.index]] for span in spans if levels[span.index] != span.level}


def _error(width: Width) -> float:
    return sum(4.0**-bits for bits in width)


class Budget:
    """Keeps a cache within its budget; `groups` are its layers, by groups that pack together."""

    def __init__(self, groups: Sequence[Sequence[LayerCache]], per_bit: float, resident: Callable[[], int]) -> None:
        self.groups = groups
        self.settings = groups[0][0].settings
        self._per_bit = per_bit
        self._resident = resident
        self._warned = False

    def keep(self) -> None:
        """Take bits from blocks until everything resident fits. All layers have just stored a block."""
        limit = self.settings.budget_bytes
        # What comes free is foreseen without scales and codebooks, so it takes another look.
        while (surplus := self._resident() - limit) > 0:
            chosen = choose_widths(self._spans(), self.settings.widths, self._per_bit, surplus)
            if not chosen:
                self._warn(limit, surplus)
                break
            for index, width in chosen.items():
                for group in self.groups:
                    repack(group, index, width)
        for layer in (layer for group in self.groups for layer in group):
            layer.newest_moment = None

    def _spans(self) -> list[Stored]:
        """What can lose bits."""
        ladder, entries = self.settings.widths, self.groups[0][0].entries
        spans = [(i, entry.stored) for i, entry in enumerate(entries) if isinstance(entry.stored, PackedSpan)]
        return [Stored(i, span.tokens, ladder.index((span.key_bits, span.value_bits))) for i, span in spans]

    def _warn(self, limit: int, surplus: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "QuantWM: the budget of %.3g GB is too small by %.3g GB even with all blocks in the fewest bits that "
                "QuantWM KV Cache allows, so the cache grows beyond it. Raise budget_gb in Cache Budget, or set a "
                "window in World Sampler.",
                limit / 2**30,
                surplus / 2**30,
            )

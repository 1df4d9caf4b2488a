"""A budget in bytes: which blocks of the history are stored in 2, 4 or 8 bits.

After WindowQuant (arXiv 2605.02262), which gives each window of visual tokens the bits that its similarity to the
prompt deserves. An autoregressive video measures something better while it runs: the passes over a block show how much
attention each earlier block draws. And later blocks keep asking, so the choice cannot be made once. A block is packed
in the most bits; whenever the cache has outgrown its budget, those blocks lose bits that lose least by it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .packing import repack
from .span import PackedSpan

if TYPE_CHECKING:
    from .layer_cache import Entry, LayerCache

logger = logging.getLogger(__name__)

Width = tuple[int, int]


class AttentionMass:
    """How much attention the passes over the coming block pay to each stored piece of one layer."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._tokens: list[int] = []
        self._log_tokens: torch.Tensor | None = None
        self._total: torch.Tensor | None = None
        self._passes = 0

    def forget(self) -> None:
        """Start anew, for another block."""
        self.__init__()

    def observe(self, queries: torch.Tensor, entries: Sequence[Entry]) -> None:
        """Note the queries `[B, T, H, D]` of one pass; entries without a mean key are left out."""
        known = [entry for entry in entries if entry.mean_key is not None]
        tokens = [entry.stored.tokens for entry in known]
        if not known:
            return
        if self._total is None or tokens != self._tokens:
            self.forget()
            self.numbers, self._tokens = [entry.first for entry in known], tokens
            self._log_tokens = torch.tensor(tokens, device=queries.device, dtype=torch.float32).log()
        means = torch.stack([entry.mean_key for entry in known])
        shares = attention_shares(queries, means, self._log_tokens)
        self._total = shares if self._total is None else self._total + shares
        self._passes += 1

    def per_token(self) -> torch.Tensor | None:
        """Mean share of a token of each piece, float `[n]`, in the order of `numbers`; None when nothing was asked."""
        return None if self._total is None else self._total / self._passes / self._log_tokens.exp()


def attention_shares(queries: torch.Tensor, means: torch.Tensor, log_tokens: torch.Tensor) -> torch.Tensor:
    """Share of each of n pieces in the attention of queries `[B, T, H, D]`, if all keys of a piece were its mean key.

    Args:
        means: `[n, B, H, D]`.
        log_tokens: float `[n]`, log of the number of keys in each piece.

    Returns:
        float `[n]`, summing to 1: the mean over batch, queries and heads.
    """
    scores = torch.einsum("bthd,nbhd->bthn", queries, means.to(queries.dtype)).float() * queries.shape[-1] ** -0.5
    return (scores + log_tokens).softmax(-1).mean((0, 1, 2))


@dataclass(frozen=True)
class Stored:
    """A span that may lose bits: its place, its tokens, its width as a place in the ladder, and its attention."""

    index: int
    tokens: int
    level: int
    mass_per_token: float


def choose_widths(spans: Sequence[Stored], ladder: Sequence[Width], per_bit: float, surplus: float) -> dict[int, Width]:
    """New widths, by place, that free `surplus` bytes or all there are to free.

    Steps down the ladder are taken where they cost least: attention times the growth of the squared error, which a bit
    less makes four times as large, over the bytes that come free. Among equals the oldest goes first.

    Args:
        ladder: widths, fewest bits first.
        per_bit: bytes that one bit of keys, or of values, takes for one token.
    """
    levels = {span.index: span.level for span in spans}

    def price(span: Stored) -> float:
        lower, upper = ladder[levels[span.index] - 1], ladder[levels[span.index]]
        return span.mass_per_token * (_error(lower) - _error(upper)) / (sum(upper) - sum(lower))

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
        layers = [layer for group in self.groups for layer in group]
        masses = _mass_per_token(layers)
        limit = self.settings.budget_bytes
        # What comes free is foreseen without scales and codebooks, so it takes another look.
        while (surplus := self._resident() - limit) > 0:
            chosen = choose_widths(self._spans(masses), self.settings.widths, self._per_bit, surplus)
            if not chosen:
                self._warn(limit, surplus)
                break
            for index, width in chosen.items():
                for group in self.groups:
                    repack(group, index, width)
        for layer in layers:
            layer.newest_moment = None
            layer.mass.forget()

    def _spans(self, masses: dict[int, float]) -> list[Stored]:
        """What can lose bits. Nobody has asked for the newest block yet; the next one is going to, and most of all."""
        ladder, unasked = self.settings.widths, max(masses.values(), default=1.0)
        spans = []
        for index, entry in enumerate(self.groups[0][0].entries):
            if isinstance(entry.stored, PackedSpan):
                asked = [masses[number] for number in entry.numbers if number in masses]
                mass = max(asked, default=unasked)
                level = ladder.index((entry.stored.key_bits, entry.stored.value_bits))
                spans.append(Stored(index, entry.stored.tokens, level, mass))
        return spans

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


def _mass_per_token(layers: Sequence[LayerCache]) -> dict[int, float]:
    """Attention that a token of each block drew from the newest one, mean over layers, by the block's number."""
    measured = [mass for layer in layers if (mass := layer.mass.per_token()) is not None]
    if not measured:
        return {}
    values = torch.stack(measured).mean(0).tolist()
    return {n: value for n, value in zip(layers[0].mass.numbers, values, strict=True) if math.isfinite(value)}

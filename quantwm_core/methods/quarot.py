"""`quarot`: keys and values rotated by a Hadamard matrix, then rounded as `rtn` does (QuaRot, arXiv 2404.00456).

The rotation spreads outlier channels over all others, in keys as they are stored. The paper rotates the queries too;
decoding turns keys back instead, which gives the same logits and leaves the model's own attention as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..codec.hadamard import hadamard_rotation
from ..jensen import KeySteps
from ..query_stats import QueryStats
from ..settings import CacheSettings
from ..span import PackedSpan
from .base import LayerState
from .quantwm_paper import plain_rounding


@dataclass(frozen=True)
class QuaRot:
    settings: CacheSettings
    name: str = "quarot"

    uses_queries = False
    uses_earlier_queries = False
    rehearses = False
    recent_tokens = 0

    def encode(self, k: torch.Tensor, v: torch.Tensor, stats: QueryStats, state: LayerState) -> PackedSpan:
        keys, values = (
            x if bits == 16 else x.float() @ _rotation(x)
            for x, bits in ((k, self.settings.key_bits), (v, self.settings.value_bits))
        )
        span = plain_rounding(self.settings, self.name).encode(keys, values, stats, state)
        return replace(span, dtype=k.dtype)

    def decode(self, span: PackedSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, S, H, D]` in the dtype they came in."""
        rotated = replace(span, dtype=torch.float32, rotation=None)
        keys, values = (
            x if bits == 16 else x @ _rotation(x).T
            for x, bits in zip(
                plain_rounding(self.settings, self.name).decode(rotated), (span.key_bits, span.value_bits)
            )
        )
        return span.turned(keys).to(span.dtype), values.to(span.dtype)

    def key_steps(self, span: PackedSpan) -> list[KeySteps]:
        steps = plain_rounding(self.settings, self.name).key_steps(span)
        return [replace(each, rotation=hadamard_rotation(span.head_dim)) for each in steps]


def _rotation(like: torch.Tensor) -> torch.Tensor:
    return hadamard_rotation(like.shape[-1]).to(like.device)

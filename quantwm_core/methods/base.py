"""What every method offers, and the state one layer keeps between its spans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from ..jensen import KeySteps
from ..query_stats import QueryStats, RunningMoment
from ..span import PackedSpan, storage_bytes


@dataclass
class LayerState:
    """Everything a layer carries from span to span; all of it counts as resident memory.

    value_metric: gives the Gram matrix `[H, D, D]` of the output projection of each head, or None when unknown.
    shared: tensors that several spans refer to (a basis, a codebook), by name.
    """

    value_metric: Callable[[], torch.Tensor] | None = None
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    learned_at: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    earlier: RunningMoment = field(default_factory=RunningMoment)

    def due(self, name: str) -> bool:
        """Whether a shared piece is to be learned (again): at first, then each time the history has doubled.

        Its cost thereby stays a shrinking share of the cache, and short spans do not pay for one each.
        """
        return name not in self.learned_at or self.tokens >= 2 * self.learned_at[name]

    def learn(self, name: str, tokens: int, **tensors: torch.Tensor) -> None:
        """Store freshly learned tensors; `tokens` is the length of the span they were learned from."""
        self.learned_at[name] = max(self.tokens + tokens, 1)
        self.shared.update(tensors)

    def fork(self) -> LayerState:
        """A copy to try an encoding on; what it learns stays in the copy."""
        return replace(self, shared=dict(self.shared), learned_at=dict(self.learned_at))

    def tensors(self) -> list[torch.Tensor]:
        moment = self.earlier.moment
        return list(self.shared.values()) + ([] if moment is None else [moment])

    def nbytes(self, seen: set[int]) -> int:
        """Bytes not already counted in `seen`."""
        return storage_bytes(self.tensors(), seen)


class Method(Protocol):
    """A way to store keys and values; shapes `[B, S, H, D]`.

    uses_queries: wants the second moment of a span's queries; uses_earlier_queries: and that of all before it.
    rehearses: wants noisy queries before frames that are given, and so never denoised, are packed.
    recent_tokens: newest tokens that stay in full precision; a method with such a window also names `token_group`, and
        is given whole groups of that many tokens only.
    """

    name: str
    uses_queries: bool
    uses_earlier_queries: bool
    rehearses: bool
    recent_tokens: int

    def encode(self, k: torch.Tensor, v: torch.Tensor, stats: QueryStats, state: LayerState) -> PackedSpan: ...

    def decode(self, span: PackedSpan) -> tuple[torch.Tensor, torch.Tensor]: ...

    def key_steps(self, span: PackedSpan) -> list[KeySteps]:
        """How finely the keys of a span were rounded, for the correction of attention; never asked of 16-bit keys."""
        ...


def raw_copy(x: torch.Tensor) -> torch.Tensor:
    """A tensor in storage of its own: a view would keep the whole tensor it was cut from alive."""
    return x.contiguous().clone()

"""Second moment of the queries per head: what QSAC weighs channels by and PSAC takes its directions from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .backends import eager
from .rotation import Rotation


@eager
def second_moment(queries: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """Mean of q q^T over tokens: `[B, T, H, D]` -> float32 `[B, H, D, D]`; added to `total` in place, if given."""
    by_head = queries.transpose(1, 2).float()
    moment = by_head.transpose(-1, -2) @ by_head / queries.shape[1]
    return moment if total is None else total.add_(moment)


@dataclass
class QueryStats:
    """Statistics for one span.

    own: moment of the queries of the span's own passes, noisy and clean, `[B, H, D, D]`; all are known when the span
        is packed, so using them is causal.
    earlier: moment of all queries of earlier spans, or None before the first one (QuantWM, section 3.2).
    rotation: the RoPE that the span's keys get when they are read, None where they have it; queries always have it.
    """

    own: torch.Tensor | None = None
    earlier: torch.Tensor | None = None
    rotation: Rotation | None = None

    def seen(self, metric: torch.Tensor | None) -> torch.Tensor | None:
        """A metric `[N, D, D]` of keys as queries meet them, for keys as they are stored; see `Rotation.seen`."""
        return metric if metric is None or self.rotation is None else self.rotation.seen(metric)


class RunningMoment:
    """Weighted mean of second moments."""

    def __init__(self) -> None:
        self.moment: torch.Tensor | None = None
        self.weight = 0.0

    def add(self, moment: torch.Tensor, weight: float = 1.0) -> None:
        self.weight += weight
        if self.moment is None:
            self.moment = moment.clone()
        else:
            self.moment.lerp_(moment, weight / self.weight)

"""Measures inside a run what packing does to attention logits; costs nothing unless it is attached."""

from __future__ import annotations

import math

import torch


class LogitProbe:
    """Keeps the true keys beside the packed ones and compares both under the run's own queries (paper, table 4).

    top1_shift: share of queries whose strongest token changes. logit_mse: mean squared error of the logits of history
    tokens, each query's mean error removed because softmax does not see it.
    """

    def __init__(self, queries_per_pass: int = 64) -> None:
        self.queries_per_pass = queries_per_pass
        self._true_keys: dict[int, list[torch.Tensor]] = {}
        self._asked = 0
        self._shifted = 0.0
        self._squared = 0.0

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Note one pass: `queries` `[B, T, H, D]` over `keys` `[B, S, H, D]`: decoded history, then live tokens."""
        history = self._true_keys.get(layer)
        if history is None:
            return
        stride = -(-queries.shape[1] // self.queries_per_pass)
        q = queries[:, ::stride].transpose(1, 2).float() / math.sqrt(queries.shape[-1])
        past = torch.cat(history, dim=1)
        live = keys[:, past.shape[1] :]
        true = q @ torch.cat((past, live), dim=1).permute(0, 2, 3, 1).float()
        got = q @ keys.permute(0, 2, 3, 1).float()
        error = (got - true)[..., : past.shape[1]]
        error = error - error.mean(-1, keepdim=True)
        asked = q.shape[:3].numel()
        self._asked += asked
        self._shifted += float((got.argmax(-1) != true.argmax(-1)).float().sum())
        self._squared += float(error.square().mean(-1).sum())

    def commit(self, layer: int, keys: torch.Tensor) -> None:
        """Note the true keys of a block that becomes history."""
        self._true_keys.setdefault(layer, []).append(keys)

    @property
    def top1_shift(self) -> float:
        return self._shifted / max(self._asked, 1)

    @property
    def logit_mse(self) -> float:
        return self._squared / max(self._asked, 1)

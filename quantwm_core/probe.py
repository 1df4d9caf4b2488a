"""Measures inside a run what packing does to attention, head by head; costs nothing unless it is attached."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

# Rows of the sums `[5, B, H]` that are kept for each layer.
ASKED, SHIFTED, LOGITS, WRONG, NORM = range(5)


class LogitProbe:
    """Keeps the true keys and values beside the packed ones and compares both under the same queries (paper, table 4).

    top1_shift: share of queries whose strongest token changes. logit_mse: mean squared error of the logits of history
    tokens, without each query's mean error, which moves all of them alike. attention_error: length of the error of the
    attention output over the length of the output (root of the summed squares of both).

    teacher_forced: the run goes on with attention over true keys and values, so that every method is asked the same
        questions as full precision and errors of one layer do not reach the next. The probed run's pictures are
        those of full precision then.
    """

    def __init__(self, queries_per_pass: int = 64, teacher_forced: bool = False) -> None:
        self.queries_per_pass = queries_per_pass
        self.teacher_forced = teacher_forced
        self._true: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._sums: dict[int, torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        live: tuple[torch.Tensor, torch.Tensor],
        attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Note one pass, and return the attention output that the run goes on with, `[B, T, H * D]`.

        Args:
            queries: `[B, T, H, D]`; keys: `[B, S, H, D]`, the decoded history followed by the live block.
            live: true keys and values of the block, `[B, T, H, D]`.
            attention: the host's, of queries, keys and values.
            out: what the packed cache gave, `[B, T, H * D]`.

        Raises:
            ValueError: when the cache holds another number of tokens than were committed here.
        """
        history = self._true.get(layer)
        if history is None:
            return out
        true_k, true_v = (torch.cat((*past, block), dim=1) for past, block in zip(zip(*history), live))
        if true_k.shape != keys.shape:
            raise ValueError(
                f"the probe needs a cache that keeps all tokens: it saw {true_k.shape[1]}, the cache holds "
                f"{keys.shape[1]}. Probe without a window."
            )
        true_out = attention(queries, true_k, true_v)
        sums = self._sums.setdefault(layer, torch.zeros(5, queries.shape[0], queries.shape[2], dtype=torch.float64))
        self._note_logits(sums, queries, keys, true_k, keys.shape[1] - live[0].shape[1])
        by_head = [t.unflatten(-1, queries.shape[2:]).float() for t in (out - true_out, true_out)]
        sums[WRONG] += by_head[0].square().sum((1, 3)).cpu()
        sums[NORM] += by_head[1].square().sum((1, 3)).cpu()
        return true_out if self.teacher_forced else out

    def commit(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Note the true keys and values of a block that becomes history."""
        self._true.setdefault(layer, []).append((keys, values))

    @property
    def top1_shift(self) -> float:
        return self._share(SHIFTED, ASKED)

    @property
    def logit_mse(self) -> float:
        return self._share(LOGITS, ASKED)

    @property
    def attention_error(self) -> float:
        return math.sqrt(self._share(WRONG, NORM))

    def top1_shift_each(self) -> list[float]:
        """`top1_shift` of each entry of the batch."""
        total = sum(sums.sum(2) for sums in self._sums.values())
        return (total[SHIFTED] / total[ASKED]).tolist() if self._sums else []

    def by_head(self) -> dict[str, list[list[float]]]:
        """The three measures by name, each as rows of layers with a value for each head."""
        layers = [self._sums[layer].sum(1) for layer in sorted(self._sums)]
        return {
            "top1_shift": [(s[SHIFTED] / s[ASKED]).tolist() for s in layers],
            "logit_mse": [(s[LOGITS] / s[ASKED]).tolist() for s in layers],
            "attention_error": [(s[WRONG] / s[NORM].clamp_min(1e-30)).sqrt().tolist() for s in layers],
        }

    def _note_logits(
        self, sums: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, true_k: torch.Tensor, history: int
    ) -> None:
        stride = -(-queries.shape[1] // self.queries_per_pass)
        q = queries[:, ::stride].transpose(1, 2).float() / math.sqrt(queries.shape[-1])
        true = q @ true_k.permute(0, 2, 3, 1).float()
        got = q @ keys.permute(0, 2, 3, 1).float()
        error = (got - true)[..., :history]
        error = error - error.mean(-1, keepdim=True)
        sums[ASKED] += q.shape[2]
        sums[SHIFTED] += (got.argmax(-1) != true.argmax(-1)).sum(2).cpu()
        sums[LOGITS] += error.square().mean(-1).sum(2).cpu()

    def _share(self, part: int, whole: int) -> float:
        total = sum((sums.sum((1, 2)) for sums in self._sums.values()), torch.zeros(5, dtype=torch.float64))
        return float(total[part] / total[whole]) if total[whole] else 0.0

"""How an error in a value reaches the output of a layer."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class MetricRun(Protocol):
    """A run whose `blocks` have a `self_attn` with an output projection `o`, computed in `dtype` on `device`."""

    blocks: Any
    device: torch.device
    dtype: torch.dtype


class OutputMetric:
    """Gram matrix `[H, D, D]` of each head's part of the output projection: how an error in a value reaches the output.

    Taken by running the projection on unit vectors, so that the host's casting, offloading and LoRAs all apply.
    """

    def __init__(self, run: MetricRun, layer: int) -> None:
        self._run = run
        self._layer = layer

    def __call__(self) -> torch.Tensor:
        module = self._run.blocks[self._layer].self_attn
        width = module.num_heads * module.head_dim
        unit = torch.eye(width, device=self._run.device, dtype=self._run.dtype).unsqueeze(0)
        rows = (module.o(unit) - module.o(torch.zeros_like(unit[:, :1])))[0].float()
        by_head = rows.view(module.num_heads, module.head_dim, -1)
        return by_head @ by_head.transpose(1, 2)

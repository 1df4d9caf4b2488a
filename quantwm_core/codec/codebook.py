"""Centroids stored in 4 bits: what a coarse centroid misses, the residual codes still see."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .bits import pack_bits, unpack_bits

CENTROID_BITS = 4


@dataclass
class Codebook:
    """Affine codes of K centroids, one grid per channel.

    codes: uint8 `[N, K, packed D]`; grid: bf16 `[N, 2, D]`, the lowest value and the step of each channel.
    """

    codes: torch.Tensor
    grid: torch.Tensor

    @classmethod
    def encode(cls, centroids: torch.Tensor) -> Codebook:
        """From float `[N, K, D]`. A channel in which all centroids agree is kept exactly, as far as bf16 holds it."""
        low = centroids.amin(1).bfloat16()
        top = (1 << CENTROID_BITS) - 1
        step = ((centroids.amax(1) - low.float()) / top).clamp_min(0).bfloat16()
        unit = step.float().unsqueeze(1)
        codes = torch.where(unit > 0, (centroids - low.float().unsqueeze(1)) / unit, 0.0).round().clamp(0, top)
        return cls(pack_bits(codes.to(torch.uint8), CENTROID_BITS), torch.stack((low, step), dim=1))

    def decode(self) -> torch.Tensor:
        """Float `[N, K, D]`."""
        low, step = self.grid.float().unsqueeze(2).unbind(1)
        return low + step * unpack_bits(self.codes, CENTROID_BITS, self.grid.shape[-1]).float()


def gather_centroids(centroids: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows `[N, S, D]` of `centroids` `[N, K, D]` picked by `ids` `[N, S]`."""
    index = ids.long().unsqueeze(-1).expand(-1, -1, centroids.shape[-1])
    return centroids.gather(1, index)

"""Symmetric INT-b around zero with FP8 scales, as Quant VideoGen rounds residuals (arXiv 2602.02958).

Two bits give three values: minus the scale, zero, the scale.
"""

from __future__ import annotations

import torch

from .groups import split_groups, spread_groups

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
# Bit patterns of scales, which are never negative; the last one is no number.
FP8_PATTERNS = 128


def largest_code(bits: int) -> int:
    return (1 << (bits - 1)) - 1


def symmetric_scale(residual: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Scale of each group, FP8 E4M3 `[N, S, G]`, from float residuals `[N, S, D]`: largest magnitude over largest code.

    Beyond 448 it saturates, below 2**-10 it is zero: the format has no factor of its own.
    """
    peak = split_groups(residual, group_size).abs().amax(-1)
    return (peak / largest_code(bits)).clamp_max(FP8_LARGEST).to(FP8)


def symmetric_quantize(residual: torch.Tensor, scale: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Codes uint8 `[N, S, D]`, shifted by the largest code so that none is negative."""
    top = largest_code(bits)
    step = spread_groups(scale.float(), group_size, residual.shape[-1])
    steps = torch.where(step > 0, residual / step, 0.0)
    return (steps.round().clamp(-top, top) + top).to(torch.uint8)


def symmetric_dequantize(codes: torch.Tensor, scale: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Float `[N, S, D]`."""
    step = spread_groups(scale.float(), group_size, codes.shape[-1])
    return step * (codes.float() - largest_code(bits))


def fp8_levels(device: torch.device) -> torch.Tensor:
    """Values of the FP8 patterns that a scale can have, float `[128]`."""
    patterns = torch.arange(FP8_PATTERNS, dtype=torch.uint8, device=device)
    return patterns.view(FP8).float().nan_to_num(nan=0.0)

"""Asymmetric INT-b with an FP16 step and an FP16 minimum, as KIVI rounds (arXiv 2402.02750)."""

from __future__ import annotations

import math

import torch

from .groups import split_groups, spread_groups

FP16_LARGEST = 65504.0


def minmax_grid(x: torch.Tensor, bits: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Step and lowest value of each group along the last axis, fp16 `[N, R, G]`, from float `[N, R, C]`."""
    # A short last group is filled with a value of its own, so that filling never widens its range.
    groups = split_groups(x, group_size, fill=math.nan)
    low = groups.nan_to_num(nan=math.inf).amin(-1)
    high = groups.nan_to_num(nan=-math.inf).amax(-1)
    step = (high - low) / ((1 << bits) - 1)
    return step.clamp_max(FP16_LARGEST).half(), low.clamp(-FP16_LARGEST, FP16_LARGEST).half()


def minmax_quantize(x: torch.Tensor, step: torch.Tensor, low: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Codes uint8 `[N, R, C]` on the grid `low + step * code`."""
    unit = spread_groups(step.float(), group_size, x.shape[-1])
    above = x - spread_groups(low.float(), group_size, x.shape[-1])
    return torch.where(unit > 0, above / unit, 0.0).round().clamp(0, (1 << bits) - 1).to(torch.uint8)


def minmax_dequantize(codes: torch.Tensor, step: torch.Tensor, low: torch.Tensor, group_size: int) -> torch.Tensor:
    """Float `[N, R, C]`."""
    count = codes.shape[-1]
    unit = spread_groups(step.float(), group_size, count)
    return spread_groups(low.float(), group_size, count) + unit * codes.float()

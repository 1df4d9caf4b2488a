"""Symmetric mid-rise grid with logarithmic scales: no zero-points, and 4 bits are enough for a 2-bit group's scale.

The step follows the group's root mean square instead of its range. Two-bit grids lose less to clipping a few large
values than to stretching every step for them, and with error feedback the clipped part is passed on, not lost.
"""

from __future__ import annotations

import torch

from .groups import group_sizes, split_groups

# Step over root mean square at 2 bits; from 4 bits on the grid covers the largest value instead.
TWO_BIT_STEP = 1.25


def scale_format(bits: int) -> tuple[int, int]:
    """(bits, steps per octave) of a stored scale: half octaves in 4 bits for 2-bit codes, else 1/16 octaves in 8."""
    return (4, 2) if bits == 2 else (8, 16)


def midrise_step(residual: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Step of each group, float `[N, S, G]`, from residuals `[N, S, D]`."""
    groups = split_groups(residual, group_size)
    if bits == 2:
        sizes = group_sizes(residual.shape[-1], group_size, residual.device)
        peak = groups.abs().amax(-1, keepdim=True)
        # Normalised before squaring: values near the smallest float would vanish.
        unit = torch.where(peak > 0, groups / peak, 0.0)
        return TWO_BIT_STEP * peak.squeeze(-1) * (unit.square().sum(-1) / sizes).sqrt()
    return groups.abs().amax(-1) / (((1 << bits) - 1) / 2)


def encode_log_scales(scale: torch.Tensor, bits: int, per_octave: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales as whole steps below the largest one of their head and span; the last code means zero.

    Args:
        scale: float `[N, S, G]`, not negative.

    Returns:
        uint8 codes `[N, S, G]` below 2**bits, and the largest scale, bf16 `[N]`.
    """
    zero_code = (1 << bits) - 1
    top = scale.amax((1, 2)).bfloat16()
    ratio = top.float()[:, None, None] / scale
    code = (torch.log2(ratio) * per_octave).round().clamp(min=0)
    code = torch.where((scale > 0) & (code < zero_code), code, float(zero_code))
    return code.to(torch.uint8), top


def decode_log_scales(codes: torch.Tensor, top: torch.Tensor, bits: int, per_octave: int) -> torch.Tensor:
    """Float `[N, S, G]`."""
    factor = torch.exp2(-codes.float() / per_octave)
    factor = torch.where(codes == (1 << bits) - 1, 0.0, factor)
    return factor * top.float()[:, None, None]


def midrise_quantize(residual: torch.Tensor, step: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 of `residual` on the grid `step * (code - (2**bits - 1) / 2)`; `step` broadcasts per channel."""
    middle = ((1 << bits) - 1) / 2
    # Reciprocals, because kernels divide once a group; clamped, because that of the smallest steps is infinite.
    inverse = torch.where(step > 0, 1 / step, 0.0).clamp_max(torch.finfo(torch.float32).max)
    return (residual * inverse + middle).clamp(0, 2 * middle).round().to(torch.uint8)


def midrise_dequantize(codes: torch.Tensor, step: torch.Tensor, bits: int) -> torch.Tensor:
    """Float values of `codes`; `step` broadcasts per channel."""
    return step * (codes.float() - ((1 << bits) - 1) / 2)

"""Affine INT-b with an integer zero-point, as the QuantWM paper stores it (section 3.1, appendix D.1)."""

from __future__ import annotations

import torch

from .groups import split_groups, spread_groups

SCALE_LEVELS = 255


def affine_grid(
    residual: torch.Tensor, bits: int, group_size: int, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero-point of each group; the range is stretched to contain 0, or INT2 zero-points would clamp.

    Args:
        residual: float `[N, S, D]`.
        symmetric: the range is from -max |r| to max |r| in an odd number of levels, three at 2 bits, as Quant VideoGen
            rounds residuals (arXiv 2602.02958). The largest code, 2**bits - 1, must not be used then.

    Returns:
        scale float `[N, S, G]` (0 for an all-zero group), zero-point uint8 `[N, S, G]`.
    """
    groups = split_groups(residual, group_size)
    if symmetric:
        largest = (1 << (bits - 1)) - 1
        scale = groups.abs().amax(-1) / largest
        return scale, torch.full_like(scale, largest, dtype=torch.uint8)
    low = groups.amin(-1).clamp_max(0)
    high = groups.amax(-1).clamp_min(0)
    top = (1 << bits) - 1
    scale = (high - low) / top
    zero = torch.where(scale > 0, -low / scale, 0.0).round().clamp(0, top)
    return scale, zero.to(torch.uint8)


def affine_quantize(
    residual: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, group_size: int
) -> torch.Tensor:
    """Codes uint8 `[N, S, D]` of `residual` on the grid `scale * (code - zero)`."""
    channels = residual.shape[-1]
    step = spread_groups(scale, group_size, channels)
    offset = spread_groups(zero.float(), group_size, channels)
    steps = torch.where(step > 0, residual / step, 0.0)
    return (steps.round() + offset).clamp(0, (1 << bits) - 1).to(torch.uint8)


def affine_dequantize(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group_size: int) -> torch.Tensor:
    """Float `[N, S, D]` from codes, scales and zero-points."""
    channels = codes.shape[-1]
    offset = spread_groups(zero.float(), group_size, channels)
    return spread_groups(scale, group_size, channels) * (codes.float() - offset)


def encode_scales(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 scales under one FP16 factor per head and span.

    Args:
        scale: float `[N, S, G]`, not negative.

    Returns:
        uint8 `[N, S, G]` and fp16 `[N]`; a positive scale never rounds to zero.
    """
    peak = scale.amax((1, 2))
    factor = (peak / SCALE_LEVELS).clamp(min=0, max=torch.finfo(torch.float16).max)
    # Rounded up to a subnormal: a factor that underflows would erase the whole span.
    factor = torch.where(peak > 0, factor.clamp_min(2.0**-24), factor).half()
    unit = factor.float()[:, None, None]
    codes = torch.where(unit > 0, (scale / unit).round(), 0.0).clamp(0, SCALE_LEVELS)
    codes = torch.where((scale > 0) & (codes == 0), 1.0, codes)
    return codes.to(torch.uint8), factor


def decode_scales(codes: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Float `[N, S, G]`."""
    return codes.float() * factor.float()[:, None, None]

"""Classifier-free guidance as LongCat-Video is sampled with: the unconditional flow is scaled to fit the other one.

CFG-Zero* (arXiv 2503.18886, optimized scale). The scale is taken over the frames that are made: the given ones have no
flow here. The published code does so with its cache and counts the given frames without it, which differs by some
percent; both are official.
"""

from __future__ import annotations

import torch


def guided_flow(args: dict) -> torch.Tensor:
    """For the host's `sampler_cfg_function`: both predictions come as flow times noise level, `[B, C, T, H, W]`."""
    positive, negative = args["cond"], args["uncond"]
    dims = tuple(range(1, positive.ndim))
    fit = (positive * negative).sum(dims, keepdim=True) / ((negative**2).sum(dims, keepdim=True) + 1e-8)
    negative = negative * fit
    return negative + args["cond_scale"] * (positive - negative)

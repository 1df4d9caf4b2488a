"""Rotary positions of a grid of tokens."""

from __future__ import annotations

import torch
from comfy.ldm.flux.math import rope

THETA = 10000


def positions(head_dim: int, place: tuple[int, int, int, int], device: torch.device) -> torch.Tensor:
    """Rotations float32 `[1, S, 1, D / 2, 2, 2]`, as the host's `apply_rope1` takes them.

    Args:
        place: first frame, frames, rows and columns of the grid. A third of the width goes to each axis, what is left
            over to time.
    """
    start, frames, rows, columns = place
    plane = 2 * (head_dim // 6)
    axes = (
        (head_dim - 2 * plane, torch.arange(start, start + frames, device=device)[:, None, None]),
        (plane, torch.arange(rows, device=device)[None, :, None]),
        (plane, torch.arange(columns, device=device)[None, None, :]),
    )
    turns = [rope(at.expand(frames, rows, columns).reshape(1, -1), width, THETA) for width, at in axes]
    return torch.cat(turns, dim=2).unsqueeze(2)

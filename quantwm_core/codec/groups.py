"""Channel groups: each token's channels are cut into groups that share a scale; the last group may be short."""

from __future__ import annotations

import torch


def group_count(channels: int, group_size: int) -> int:
    return -(-channels // group_size)


def split_groups(x: torch.Tensor, group_size: int, fill: float = 0.0) -> torch.Tensor:
    """`[..., D]` -> `[..., G, group_size]`; a short last group is filled with `fill`."""
    missing = -x.shape[-1] % group_size
    if missing:
        x = torch.nn.functional.pad(x, (0, missing), value=fill)
    return x.unflatten(-1, (-1, group_size))


def spread_groups(per_group: torch.Tensor, group_size: int, channels: int) -> torch.Tensor:
    """`[..., G]` -> `[..., D]`: every channel gets its group's value."""
    return per_group.repeat_interleave(group_size, dim=-1)[..., :channels]


def group_sizes(channels: int, group_size: int, device: torch.device) -> torch.Tensor:
    """Real channels in each group, float `[G]`."""
    return split_groups(torch.ones(channels, device=device), group_size).sum(-1)

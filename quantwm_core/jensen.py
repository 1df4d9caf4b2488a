"""Correction of the bias that rounding noise in keys puts on attention (arXiv 2605.26266).

The weight of a key is the exponential of its logit, and noise of zero mean makes the mean of an exponential larger, so
rounded keys draw more attention than they should. For noise spread evenly over each key's rounding step D_ic the mean
grows by exp(b_i), and b_i is taken off the logit of key i:

    b_i = sum_c log(sinh(a_c) / a_c),   a_c = q_c D_ic / (2 sqrt(d))          exact
    b_i = sum_c (q_c D_ic)^2 / (24 d)                                         second order

A method says in which coordinates of the query its noise lies and which step each key has there (`KeySteps`). Keys in
full precision have no noise and get no correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .span import PackedSpan, RawBlock

# Widest head that the fused attention kernels of torch take, and what it must be a multiple of.
WIDEST_HEAD, WIDTH_STEP = 256, 8
# Bound on any intermediate table, in elements (64 MiB of float32).
CHUNK_ELEMENTS = 1 << 24


@dataclass(eq=False)
class KeySteps:
    """Rounding steps of the keys of a span, as levels that many keys share; N is batch times heads.

    levels: float `[N, L, C]`, the step that level l means in each of C groups of channels; zero is no noise.
    index: `[N, S, C]` level of each key by group, or `[N, S, 1]` where one level holds for all groups.
    group_size: channels that share a step.
    rotation: orthonormal `[D, D]`; noise lies in `q @ rotation`.
    basis: `[N, D, R]`, directions in which the keys carry no noise because it was corrected there.
    """

    levels: torch.Tensor
    index: torch.Tensor
    group_size: int
    rotation: torch.Tensor | None = None
    basis: torch.Tensor | None = None

    def to(self, device: torch.device) -> KeySteps:
        """The same on `device`; the rotation, which all spans share, moves when it is used."""
        basis = None if self.basis is None else self.basis.to(device)
        return replace(self, levels=self.levels.to(device), index=self.index.to(device), basis=basis)

    def project(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries float `[N, T, D]` in the coordinates of the noise."""
        if self.rotation is not None:
            queries = queries @ self.rotation.to(queries)
        if self.basis is not None:
            basis = self.basis.to(queries)
            queries = queries - (queries @ basis) @ basis.transpose(1, 2)
        return queries

    @property
    def coordinates(self) -> tuple:
        """Equal for steps whose projections of a query are the same."""
        return tuple(None if t is None else t.data_ptr() for t in (self.rotation, self.basis))


def layers_read(method: str, jensen: str, head_dim: int) -> int:
    """How many layers in full precision are alive while one attends: itself, and a second form of its keys and values.

    To second order that form is as wide as the steps need it: `kivi` has a step for each channel, so it doubles.
    """
    if jensen == "off":
        return 1
    return 3 if jensen == "second-order" and method == "kivi" and 2 * head_dim <= WIDEST_HEAD else 2


@dataclass(frozen=True)
class _Placed:
    """Steps and the position of their first key."""

    start: int
    steps: KeySteps


def log_sinh_ratio(a: torch.Tensor) -> torch.Tensor:
    """log(sinh(a) / a), zero at zero, without overflow for large `a` and without cancellation for small."""
    a = a.abs()
    square = a.square()
    small = square * (1 / 6 + square * (-1 / 180 + square * (1 / 2835 - square / 37800)))
    safe = a.clamp_min(0.5)
    return torch.where(a < 0.5, small, safe + torch.log1p(-torch.exp(-2 * safe)) - torch.log(2 * safe))


def key_bias(queries: torch.Tensor, steps: KeySteps, exact: bool) -> torch.Tensor:
    """b for every query and key, float `[N, T, S]`, from queries float `[N, T, D]`."""
    projected = steps.project(queries)
    if exact:
        costs = exact_costs(projected, steps)
    else:
        norms = _group_norms(projected, steps.group_size)
        costs = norms.unsqueeze(2) * steps.levels.square().unsqueeze(1) / (24 * queries.shape[-1])
    index = steps.index.long()
    if index.shape[-1] == 1:
        costs = costs.sum(-1, keepdim=True)
    total = 0.0
    for level_costs, level in zip(costs.unbind(-1), index.unbind(-1)):
        total = total + level_costs.gather(2, level.unsqueeze(1).expand(-1, costs.shape[1], -1))
    return total


def attend_corrected(
    queries: torch.Tensor,
    pieces: Sequence[RawBlock | PackedSpan],
    key_steps: Callable[[PackedSpan], list[KeySteps]],
    exact: bool,
    read: Callable[[], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor | None:
    """Attention `[B, T, H * D]` of `queries` `[B, T, H, D]` with corrected logits; None where no key needs correcting.

    The second-order form goes into a few more channels of queries and keys where the head is narrow enough. The exact
    form, and wide heads, go through torch's attention with a bias, some queries at a time.
    """
    placed = list(_placed(pieces, key_steps, queries.device))
    if not placed:
        return None
    q, k, v = (t.transpose(1, 2) for t in (queries, *read()))
    channels = None if exact else _channels(placed)
    width = None if channels is None else -(-(q.shape[-1] + len(channels)) // WIDTH_STEP) * WIDTH_STEP
    if width is not None and width <= WIDEST_HEAD:
        out = _attend_with_channels(q, k, v, placed, channels, width)
    else:
        out = _attend_with_bias(q, k, v, placed, exact)
    return out.transpose(1, 2).flatten(2)


def _placed(pieces, key_steps: Callable, device: torch.device) -> Iterator[_Placed]:
    start = 0
    for piece in pieces:
        if isinstance(piece, PackedSpan) and piece.key_bits != 16:
            # Spans may be kept on the CPU; their steps are a small part of them.
            for steps in key_steps(piece):
                yield _Placed(start, steps.to(device))
        start += piece.tokens


def _channels(placed: list[_Placed]) -> dict[tuple, int]:
    """Appended channels by (coordinates, group), numbered; spans with the same coordinates share theirs."""
    names = {(p.steps.coordinates, group): None for p in placed for group in range(p.steps.levels.shape[-1])}
    return {name: number for number, name in enumerate(names)}


def _attend_with_channels(q, k, v, placed: list[_Placed], channels: dict[tuple, int], width: int) -> torch.Tensor:
    """Keys get -D^2 of each group, queries sqrt(d) |q_g|^2 / (24 d): their product is -b before the scale."""
    head_dim = q.shape[-1]
    scale = head_dim**-0.5
    wide_q, wide_k = (torch.nn.functional.pad(t, (0, width - head_dim)) for t in (q, k))
    flat = q.flatten(0, 1).float()
    for p in placed:
        steps, groups = p.steps, p.steps.levels.shape[-1]
        at = head_dim + channels[steps.coordinates, 0]
        norms = _group_norms(steps.project(flat), steps.group_size) * (head_dim**0.5 / (24 * head_dim))
        squares = steps.levels.square().gather(1, steps.index.long().expand(-1, -1, groups))
        part = slice(p.start, p.start + squares.shape[1])
        wide_q[..., at : at + groups] = norms.view(*q.shape[:3], groups)
        wide_k[..., part, at : at + groups] -= squares.view(*k.shape[:2], -1, groups)
    wide_v = torch.nn.functional.pad(v, (0, width - head_dim))
    return torch.nn.functional.scaled_dot_product_attention(wide_q, wide_k, wide_v, scale=scale)[..., :head_dim]


def _attend_with_bias(q, k, v, placed: list[_Placed], exact: bool) -> torch.Tensor:
    batch, heads, count, _ = q.shape
    keys = k.shape[2]
    size = max(1, CHUNK_ELEMENTS // (batch * heads * keys))
    outputs = []
    for some in q.split(size, dim=2):
        bias = some.new_zeros(batch * heads, some.shape[2], keys)
        for p in placed:
            taken = key_bias(some.flatten(0, 1).float(), p.steps, exact)
            bias[..., p.start : p.start + taken.shape[-1]] -= taken
        bias = bias.view(batch, heads, -1, keys)
        outputs.append(torch.nn.functional.scaled_dot_product_attention(some, k, v, attn_mask=bias))
    return torch.cat(outputs, dim=2)


def _group_norms(queries: torch.Tensor, group_size: int) -> torch.Tensor:
    """Squared length of each channel group, `[N, T, C]`."""
    missing = -queries.shape[-1] % group_size
    return torch.nn.functional.pad(queries, (0, missing)).square().unflatten(-1, (-1, group_size)).sum(-1)


def exact_costs(projected: torch.Tensor, steps: KeySteps) -> torch.Tensor:
    """Summed log(sinh a / a) of each channel group at each level, `[N, T, L, C]`."""
    levels = steps.levels.unsqueeze(1).unsqueeze(-1)
    missing = -projected.shape[-1] % steps.group_size
    grouped = torch.nn.functional.pad(projected, (0, missing)).unflatten(-1, (-1, steps.group_size)).unsqueeze(2)
    half = 1 / (2 * math.sqrt(projected.shape[-1]))
    size = max(1, CHUNK_ELEMENTS // (levels.numel() * steps.group_size))
    return torch.cat([log_sinh_ratio(some * half * levels).sum(-1) for some in grouped.split(size, dim=1)], dim=1)

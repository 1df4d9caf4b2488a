"""Which centroid each token takes, and the steps of what is left: one pass over keys or values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..quantwm_core.codec.codebook import Codebook
from ..quantwm_core.codec.groups import group_count
from ..quantwm_core.codec.midrise import TWO_BIT_STEP
from ..quantwm_core.codec.qsac import BUCKETS
from .encode_codebook import Operands
from .encode_tiles import (
    as_operand,
    centroid_bias,
    head_pointer,
    index_of,
    load_centroids,
    load_grid,
    load_units,
    with_index,
)
from .launching import launch
from .sizes import ceil_div, next_power

TILE = 64
LAUNCH = {"num_warps": 4, "num_stages": 2}
# Two to the 127th: farther than any centroid, and index 0 where only NaN was found.
FARTHEST = tl.constexpr(2.0**127)
STEP_OVER_RMS = tl.constexpr(TWO_BIT_STEP)


@dataclass
class Match:
    """ids uint8 `[N, S]`; wanted steps float `[N, S, G]`; peaks float `[N, tiles]`, the largest step of each tile."""

    ids: torch.Tensor
    wanted: torch.Tensor
    peaks: torch.Tensor


@triton.jit
def _group_ranges(residual, D: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr):
    """Highest minus lowest value of each group of channels, float32 `[T, W / GROUP]`; 0 where there is no channel."""
    if D == W:
        groups = tl.reshape(residual, (T, W // GROUP, GROUP))
        return tl.max(groups, axis=2) - tl.min(groups, axis=2)
    real = (tl.arange(0, W) < D)[None, :]
    high = tl.max(tl.reshape(tl.where(real, residual, float("-inf")), (T, W // GROUP, GROUP)), axis=2)
    low = tl.min(tl.reshape(tl.where(real, residual, float("inf")), (T, W // GROUP, GROUP)), axis=2)
    return tl.where(high >= low, high - low, 0.0)


@triton.jit
def _group_steps(residual, BITS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr):
    """`midrise_step` of residuals that are zero beyond D: float32 `[T, W / GROUP]`."""
    groups = tl.reshape(residual, (T, W // GROUP, GROUP))
    peak = tl.max(tl.abs(groups), axis=2)
    if BITS != 2:
        return peak * (2.0 / ((1 << BITS) - 1))
    # Normalised before squaring: values near the smallest float would vanish.
    unit = groups * tl.where(peak > 0, 1.0 / tl.where(peak > 0, peak, 1.0), 0.0)[:, :, None]
    size = tl.minimum(D - tl.arange(0, W // GROUP) * GROUP, GROUP)
    mean = tl.sum(unit * unit, axis=2) / tl.maximum(size, 1).to(tl.float32)[None, :]
    return STEP_OVER_RMS * peak * tl.sqrt(mean)


@triton.jit
def _by_range(
    rows, candidates, weight, book, low, step, n, count, valid,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, GROUP: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Ids `[T]` of the centroids that leave the cheapest ranges, among the nearest (`with_index`, `[T, buckets]`)."""
    group_weight = tl.sum(tl.reshape(weight, (W // GROUP, GROUP)), axis=1)[None, :]
    # x - centroid = (x - low + 16 step) - 16 step (1 + code / 16)
    lifted = rows - (low - 16.0 * step)[None, :]
    cost = tl.full((T,), float("inf"), tl.float32)
    ids = tl.zeros((T,), tl.int32)
    for turn in tl.static_range(CANDIDATES):
        nearest = tl.min(candidates, axis=1)
        own_ids = tl.where(nearest == FARTHEST, ids, index_of(nearest))
        units = load_units(book, n, count, own_ids, valid, 0, D, W)
        ranges = _group_ranges(lifted - (16.0 * step)[None, :] * units, D, W, GROUP, T)
        own = tl.sum(group_weight * ranges * ranges, axis=1)
        if turn == 0:
            ids = own_ids
            cost = own
        else:
            ids = tl.where(own < cost, own_ids, ids)
            cost = tl.minimum(own, cost)
        candidates = tl.where(candidates == nearest[:, None], FARTHEST, candidates)
    return ids


@triton.jit
def _match_kernel(
    x, book, grid, points, bias, weights, ids_out, wanted_out, peaks_out,
    tokens, heads, count, stride_b, stride_s, stride_h,
    D: tl.constexpr, W: tl.constexpr, KC: tl.constexpr, T: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """One program a head and tile of tokens; centroids come KC at a time, and of each bucket the nearest is kept."""
    n = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * T + tl.arange(0, T)
    valid = token < tokens
    column = tl.arange(0, W)
    source = head_pointer(x, n, heads, stride_b, stride_h) + token.to(tl.int64)[:, None] * stride_s + column[None, :]
    stored = tl.load(source, mask=valid[:, None] & (column < D)[None, :], other=0.0)
    best = tl.full((T, KC), FARTHEST, tl.float32)
    for first in range(0, count, KC):
        index = first + tl.arange(0, KC)
        mask = (index < count)[:, None] & (column < D)[None, :]
        point = tl.load(points + (n * count + index)[:, None] * D + column[None, :], mask=mask, other=0.0)
        dots = tl.dot(as_operand(stored), tl.trans(as_operand(point)), input_precision="ieee")
        offset = centroid_bias(bias, n, count, index, D, W)
        best = tl.minimum(best, with_index(offset[None, :] - dots, index[None, :]))
    rows = stored.to(tl.float32)
    low, step = load_grid(grid, n, 0, D, W)
    if CANDIDATES > 1:
        weight = tl.load(weights + n * D + column, mask=column < D, other=0.0)
        ids = _by_range(rows, best, weight, book, low, step, n, count, valid, D, W, T, GROUP, CANDIDATES)
    else:
        ids = index_of(tl.min(best, axis=1))
    tl.store(ids_out + n * tokens + token, ids.to(tl.uint8), mask=valid)
    centroids = load_centroids(book, low, step, n, count, ids, valid, 0, D, W)
    residual = tl.where(valid[:, None] & (column < D)[None, :], rows - centroids, 0.0)
    wanted = _group_steps(residual, BITS, D, W, GROUP, T)
    group = tl.arange(0, W // GROUP)
    pointer = wanted_out + (n * tokens + token)[:, None] * GROUPS + group[None, :]
    tl.store(pointer, wanted, mask=valid[:, None] & (group < GROUPS)[None, :])
    tl.store(peaks_out + n * tl.num_programs(1) + tile, tl.max(tl.max(wanted, axis=1), axis=0))


def match(
    x: torch.Tensor, book: Codebook, operands: Operands, bits: int, group_size: int, candidates: int = 1
) -> Match:
    """Centroids and steps for `x` `[B, S, H, D]`: the nearest ones, or those that QSAC picks among `candidates`."""
    batch, tokens, heads, width = x.shape
    n, count = batch * heads, book.codes.shape[1]
    candidates = min(candidates, count)
    groups, tiles = group_count(width, group_size), ceil_div(tokens, TILE)
    result = Match(
        x.new_empty(n, tokens, dtype=torch.uint8),
        x.new_empty(n, tokens, groups, dtype=torch.float32),
        x.new_empty(n, tiles, dtype=torch.float32),
    )
    arguments = (
        x, book.codes, book.grid, operands.points, operands.bias, operands.weights,
        result.ids, result.wanted, result.peaks,
        tokens, heads, count, *x.stride()[:3],
    )  # fmt: skip
    launch(
        _match_kernel, (n, tiles), arguments,
        D=width, W=max(next_power(width), group_size), KC=BUCKETS, T=TILE,
        BITS=bits, GROUP=group_size, GROUPS=groups, CANDIDATES=candidates, **LAUNCH,
    )  # fmt: skip
    return result

"""Which centroid each token takes, and the steps of what is left.

Two passes over keys or values: distances, which are matrix products, and then everything that goes channel by channel.
In one pass both would share registers, which are too few for the distances to 256 centroids and a token's channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..quantwm_core.codec.codebook import Codebook
from ..quantwm_core.codec.groups import group_count
from ..quantwm_core.codec.midrise import TWO_BIT_STEP
from .decode import FLOAT_ONE
from .encode_codebook import Operands
from .encode_nearest import find_nearest, shares
from .encode_tiles import head_pointer, load_grid
from .launching import launch
from .sizes import COUNTS, next_power
from .tiles import unpack

# Twelve programs for each multiprocessor of a large GPU.
STEPS_TILE, STEPS_PROGRAMS = 8, 1584
# WORDS of 4-bit codes that a thread takes of a token: with more of them fewer threads share a group's minimum, but each
# holds more constants of channels. With STAGES tiles are read ahead, and with them the centroids that they may take.
STEPS_LAUNCH = {"WORDS": 2, "STAGES": 3, "num_warps": 1, "maxnreg": 168}
STEP_OVER_RMS = tl.constexpr(TWO_BIT_STEP)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@dataclass
class Match:
    """ids uint8 `[N, S]`; wanted steps float `[N, S, G]`; peaks float `[N, parts]`, the largest of each part of S."""

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
    # Normalised before squaring: values near the smallest float would vanish. The reciprocal of smaller ones than the
    # smallest normal float is infinite, and one infinite step leaves none to the rest of the head.
    peak = tl.maximum(peak, SMALLEST_NORMAL)
    unit = groups * (1.0 / peak)[:, :, None]
    size = tl.minimum(D - tl.arange(0, W // GROUP) * GROUP, GROUP)
    mean = tl.sum(unit * unit, axis=2) / tl.maximum(size, 1).to(tl.float32)[None, :]
    return STEP_OVER_RMS * peak * tl.sqrt(mean)


@triton.jit
def _load_codes(book, ids, valid, D: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr):
    """Rows `ids` `[T]` of a head's 4-bit codebook, int32 `[T, W / 8]`, WORDS of them in a thread."""
    word = tl.max_contiguous(tl.arange(0, W // 8), WORDS)
    place = book.to(tl.pointer_type(tl.int32)) + ids[:, None] * (D // 8) + word[None, :]
    return tl.load(place, mask=valid[:, None] & (word < D // 8)[None, :], other=0)


@triton.jit(do_not_specialize=COUNTS)
def _steps_kernel(
    x, book, grid, weights, nearest, ids_out, wanted_out, peaks_out,
    tokens, heads, count, share, stride_b, stride_s, stride_h, one,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, WORDS: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Of the nearest centroids the one that leaves the cheapest ranges, and the steps of what it leaves.

    One program a head and share of tokens.
    """
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column, group = tl.arange(0, W), tl.arange(0, W // GROUP)
    source = head_pointer(x, n, heads, stride_b, stride_h)
    own_book = book + n * count * (D // 2)
    # A centroid is low + step code = base + 16 step (1 + code / 16).
    low, step = load_grid(grid, n, 0, D, W)
    step = 16.0 * step[None, :]
    base = low[None, :] - step
    if CANDIDATES > 1:
        weight = tl.load(weights + n * D + column, mask=column < D, other=0.0)
        group_weight = tl.sum(tl.reshape(weight, (W // GROUP, GROUP)), axis=1)[None, :]
    peak = tl.zeros((T,), tl.float32)
    for start in tl.range(part * share, tl.minimum((part + 1) * share, tokens), T, num_stages=STAGES):
        token = start + tl.arange(0, T)
        valid = token < tokens
        place = source + token.to(tl.int64)[:, None] * stride_s + column[None, :]
        rows = tl.load(place, mask=valid[:, None] & (column < D)[None, :], other=0.0).to(tl.float32)
        taken = tl.load(nearest + n * tokens + token, mask=valid, other=0)
        ids = taken.to(tl.int32) & 255
        codes = _load_codes(own_book, ids, valid, D, W, WORDS)
        if CANDIDATES > 1:
            lifted = rows - base
            cost = tl.full((T,), float("inf"), tl.float32)
            for turn in tl.static_range(CANDIDATES):
                own_ids = (taken >> (8 * turn)).to(tl.int32) & 255
                own_codes = _load_codes(own_book, own_ids, valid, D, W, WORDS)
                ranges = _group_ranges(lifted - step * unpack(own_codes, one, 4, T, W), D, W, GROUP, T)
                own_cost = tl.sum(group_weight * ranges * ranges, axis=1)
                better = own_cost < cost
                ids = tl.where(better, own_ids, ids)
                codes = tl.where(better[:, None], own_codes, codes)
                cost = tl.minimum(own_cost, cost)
        tl.store(ids_out + n * tokens + token, ids.to(tl.uint8), mask=valid)
        # Both terms are exact (`tiles.open_side`), so this rounds once, as the eager twin does.
        units = unpack(codes, one, 4, T, W)
        residual = rows - tl.fma(step + tl.zeros_like(units), units, base + tl.zeros_like(units))
        if D < W:
            residual = tl.where((column < D)[None, :], residual, 0.0)
        wanted = tl.where(valid[:, None], _group_steps(residual, BITS, D, W, GROUP, T), 0.0)
        pointer = wanted_out + (n * tokens + token)[:, None] * GROUPS + group[None, :]
        tl.store(pointer, wanted, mask=valid[:, None] & (group < GROUPS)[None, :])
        peak = tl.maximum(peak, tl.max(wanted, axis=1))
    tl.store(peaks_out + n * tl.num_programs(1) + part, tl.max(peak, axis=0))


def match(
    x: torch.Tensor, book: Codebook, operands: Operands, bits: int, group_size: int, candidates: int = 1
) -> Match:
    """Centroids and steps for `x` `[B, S, H, D]`: the nearest ones, or those that QSAC picks among `candidates`."""
    batch, tokens, heads, width = x.shape
    n, count = batch * heads, book.codes.shape[1]
    candidates = min(candidates, count)
    groups, wide = group_count(width, group_size), next_power(width)
    share, parts = shares(tokens, n, STEPS_TILE, STEPS_PROGRAMS)
    result = Match(
        x.new_empty(n, tokens, dtype=torch.uint8),
        x.new_empty(n, tokens, groups, dtype=torch.float32),
        x.new_empty(n, parts, dtype=torch.float32),
    )
    # Words even for one candidate: as bytes they came out wrong on an H200 with Triton 3.6, though not interpreted.
    nearest = x.new_empty(n, tokens, dtype=torch.int32 if candidates <= 4 else torch.int64)
    find_nearest(x, operands, nearest, candidates)
    arguments = (
        x, book.codes, book.grid, operands.weights, nearest, result.ids, result.wanted, result.peaks,
        tokens, heads, count, share, *x.stride()[:3], FLOAT_ONE,
    )  # fmt: skip
    launch(
        _steps_kernel, (n, parts), arguments, D=width, W=max(wide, group_size), T=STEPS_TILE,
        BITS=bits, GROUP=group_size, GROUPS=groups, CANDIDATES=candidates, **STEPS_LAUNCH,
    )  # fmt: skip
    return result

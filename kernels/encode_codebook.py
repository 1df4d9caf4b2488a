"""Codebooks: k-means over a scattered sample of tokens, 4-bit centroids, and what finding the nearest one needs.

Cluster sums are integers (channels centred and scaled), so that adding them up in any order gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..quantwm_core.codec.codebook import Codebook
from ..quantwm_core.codec.kmeans import ITERATIONS, scatter_step
from ..quantwm_core.methods.quantwm import SAMPLE_PER_CENTROID
from .encode_tiles import (
    LARGEST,
    SLICE,
    distance_keys,
    distance_start,
    head_pointer,
    load_centroids,
    load_grid,
    load_rows,
    round_bf16,
    round_even,
)

TILE = 64
# Centroids that a program compares its tokens with at a time.
CENTROID_TILE = 64
LAUNCH = {"num_warps": 4, "num_stages": 2}
SLICE_LAUNCH = {"num_warps": 4}
# Tokens that show the range of each channel, beside those that k-means begins with.
RANGE_TOKENS = 128
# Values are clipped at this many times that range, in the sums alone.
HEADROOM = tl.constexpr(8.0)


@dataclass
class Operands:
    """What distances to the centroids of a codebook are computed from; see `distance_keys`.

    ref float `[N, D]`, points bf16 `[N, K, D]`, bias float `[N, D / 16, K]`, weights float `[N, D]` (mean 1).
    """

    ref: torch.Tensor
    points: torch.Tensor
    bias: torch.Tensor
    weights: torch.Tensor


@triton.jit
def _store_operands(centred, weight, points, bias, n, part, count, D: tl.constexpr, KP: tl.constexpr):
    """Operand and share of the bias of a slice of channels, from centroids minus ref float32 `[KP, SLICE]`."""
    index = tl.arange(0, KP)
    column = part * SLICE + tl.arange(0, SLICE)
    weighted = centred * weight[None, :]
    pointer = points + (n * count + index)[:, None] * D + column[None, :]
    tl.store(pointer, round_bf16(weighted), mask=(index < count)[:, None])
    half = 0.5 * tl.sum(weighted * centred, axis=1)
    tl.store(bias + (n * (D // SLICE) + part) * count + index, half, mask=index < count)


@triton.jit
def _place(channel, D: tl.constexpr):
    """Where a channel's sum lies in its row.

    Not in order: Triton would give each thread four neighbours, and then every atomic instruction of a warp touches
    four times the memory that it changes.
    """
    return (channel % 4) * (D // 4) + channel // 4


@triton.jit
def _start_kernel(
    x, centroids, ref, unit, points, bias, sums, sizes,
    tokens, heads, count, sample, step, stride_b, stride_s, stride_h,
    D: tl.constexpr, KP: tl.constexpr, RANGE: tl.constexpr,
):  # fmt: skip
    """Begin with evenly spaced tokens; RANGE others show each channel's range. One program a head and slice."""
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    index = tl.arange(0, KP)
    column = part * SLICE + tl.arange(0, SLICE)
    valid = (index < count)[:, None]
    source = head_pointer(x, n, heads, stride_b, stride_h) + column[None, :]
    token = index.to(tl.int64) * tokens // count
    start = tl.load(source + token[:, None] * stride_s, mask=valid, other=0.0).to(tl.float32)
    token = tl.arange(0, RANGE).to(tl.int64) * tokens // RANGE
    others = tl.load(source + token[:, None] * stride_s).to(tl.float32)
    high = tl.maximum(tl.max(tl.where(valid, start, float("-inf")), axis=0), tl.max(others, axis=0))
    low = tl.minimum(tl.min(tl.where(valid, start, float("inf")), axis=0), tl.min(others, axis=0))
    middle = low + 0.5 * (high - low)
    spread = 0.5 * (high - low)
    # A channel that stands still at the start may move later: it gets a share of its neighbours' range.
    spread = tl.maximum(tl.maximum(spread, tl.max(spread, axis=0) / 16), tl.abs(middle) / 256)
    spread = tl.where(spread > 0, spread, 1.0)
    tl.store(ref + n * D + column, middle)
    tl.store(unit + n * D + column, (2147483392.0 / sample) / (HEADROOM * spread))
    rows = (n * count + index)[:, None] * D + column[None, :]
    tl.store(centroids + rows, start, mask=valid)
    tl.store(sums + rows, tl.zeros((KP, SLICE), tl.int32), mask=valid)
    tl.store(sizes + n * count + index, tl.zeros((KP,), tl.int32), mask=index < count)
    one = tl.full((SLICE,), 1.0, tl.float32)
    _store_operands(start - middle[None, :], one, points, bias, n, part, count, D, KP)


@triton.jit
def _assign_kernel(
    x, ref, unit, points, bias, sums, sizes,
    tokens, heads, count, sample, step, stride_b, stride_s, stride_h,
    D: tl.constexpr, W: tl.constexpr, KC: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add each token of the sample to the sums of its nearest centroid; one program a head and tile of tokens."""
    n = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * T + tl.arange(0, T)
    valid = place < sample
    token = (place.to(tl.int64) * step) % tokens
    column = tl.arange(0, W)
    rows = load_rows(head_pointer(x, n, heads, stride_b, stride_h), token, valid, stride_s, D, W)
    middle = tl.load(ref + n * D + column, mask=column < D, other=0.0)
    operand, norms = distance_start(rows, middle, tl.full((W,), 1.0, tl.float32))
    best = tl.full((T,), LARGEST, tl.int32)
    for first in range(0, count, KC):
        keys = distance_keys(operand, norms, points, bias, n, count, first, D, W, KC)
        best = tl.minimum(best, tl.min(keys, axis=1))
    ids = best & 255
    scale = tl.load(unit + n * D + column, mask=column < D, other=0.0)
    limit = 2147483392.0 / sample
    whole = tl.minimum(tl.maximum((rows - middle[None, :]) * scale[None, :], -limit), limit).to(tl.int32)
    mask = valid[:, None] & (column < D)[None, :]
    tl.atomic_add(sums + n * count * D + ids[:, None] * D + _place(column, D)[None, :], whole, mask=mask, sem="relaxed")
    tl.atomic_add(sizes + n * count + ids, tl.full((T,), 1, tl.int32), mask=valid, sem="relaxed")


@triton.jit
def _update_kernel(
    centroids, ref, unit, points, bias, sums, sizes_in, sizes_out, count, D: tl.constexpr, KP: tl.constexpr
):
    """Centroids from the sums, which are cleared for the next round; an empty cluster keeps its centroid."""
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    index = tl.arange(0, KP)
    column = part * SLICE + tl.arange(0, SLICE)
    valid = (index < count)[:, None]
    rows = (n * count + index)[:, None] * D + column[None, :]
    size = tl.load(sizes_in + n * count + index, mask=index < count, other=0)[:, None]
    summed = sums + (n * count + index)[:, None] * D + _place(column, D)[None, :]
    total = tl.load(summed, mask=valid, other=0).to(tl.float32)
    old = tl.load(centroids + rows, mask=valid, other=0.0)
    middle = tl.load(ref + n * D + column)[None, :]
    scale = tl.load(unit + n * D + column)[None, :]
    mean = middle + total / (tl.maximum(size, 1).to(tl.float32) * scale)
    new = tl.where(size > 0, mean, old)
    tl.store(centroids + rows, new, mask=valid)
    tl.store(summed, tl.zeros((KP, SLICE), tl.int32), mask=valid)
    # All slices of a head read the sizes, so the ones for the next round lie elsewhere.
    tl.store(sizes_out + n * count + index, tl.zeros((KP,), tl.int32), mask=index < count)
    one = tl.full((SLICE,), 1.0, tl.float32)
    _store_operands(new - middle, one, points, bias, n, part, count, D, KP)


@triton.jit
def _book_kernel(
    centroids, moment, book, grid, ref, points, bias, weights, count,
    D: tl.constexpr, W: tl.constexpr, KP: tl.constexpr, LEARNED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Round centroids to 4 bits (if just LEARNED), then the operands of the rounded ones, weighted by the queries."""
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * SLICE
    index = tl.arange(0, KP)
    column = first + tl.arange(0, SLICE)
    valid = (index < count)[:, None]
    if LEARNED:
        exact = tl.load(centroids + (n * count + index)[:, None] * D + column[None, :], mask=valid, other=0.0)
        low = round_bf16(tl.min(tl.where(valid, exact, float("inf")), axis=0))
        high = tl.max(tl.where(valid, exact, float("-inf")), axis=0)
        step = round_bf16(tl.maximum(tl.div_rn(high - low, tl.full((SLICE,), 15.0, tl.float32)), 0.0))
        divisor = tl.where(step > 0, step, 1.0)[None, :] + tl.zeros_like(exact)
        steps = tl.where(step[None, :] > 0, tl.div_rn(exact - low[None, :], divisor), 0.0)
        codes = tl.minimum(tl.maximum(round_even(steps), 0.0), 15.0)
        nibbles = tl.reshape(codes.to(tl.int32), (KP, SLICE // 2, 2)) << (4 * tl.arange(0, 2))[None, None, :]
        pointer = book + (n * count + index)[:, None] * (D // 2) + first // 2 + tl.arange(0, SLICE // 2)[None, :]
        tl.store(pointer, tl.sum(nibbles, axis=2).to(tl.uint8), mask=valid)
        tl.store(grid + n * 2 * D + column, low)
        tl.store(grid + n * 2 * D + D + column, step)
        rounded = low[None, :] + step[None, :] * codes
    else:
        low, step = load_grid(grid, n, first, D, SLICE)
        rounded = load_centroids(book, low, step, n, count, index, index < count, first, D, SLICE)
    weight = tl.full((SLICE,), 1.0, tl.float32)
    if WEIGHTED:
        channel = tl.arange(0, W)
        diagonal = moment + n * D * D
        total = tl.sum(tl.load(diagonal + channel * (D + 1), mask=channel < D, other=0.0), axis=0)
        own = tl.load(diagonal + column * (D + 1))
        weight = tl.where(total > 0, own * (D / tl.where(total > 0, total, 1.0)), 1.0)
    middle = low + 7.5 * step
    tl.store(ref + n * D + column, middle)
    tl.store(weights + n * D + column, weight)
    _store_operands(rounded - middle[None, :], weight, points, bias, n, part, count, D, KP)


def _padded(count: int) -> int:
    return max(16, triton.next_power_of_2(count))


def learn_centroids(x: torch.Tensor, count: int) -> torch.Tensor:
    """Centroids float `[N, K, D]` of `x` `[B, S, H, D]`: the twin of k-means in `methods.quantwm.learn_codebook`."""
    batch, tokens, heads, width = x.shape
    n = batch * heads
    sample = min(tokens, SAMPLE_PER_CENTROID * count)
    step = scatter_step(tokens)
    shape = (tokens, heads, count, sample, step, *x.stride()[:3])
    new = x.new_empty
    centroids, points = new(n, count, width, dtype=torch.float32), new(n, count, width, dtype=torch.bfloat16)
    sums, sizes = new(n, count, width, dtype=torch.int32), new(2, n, count, dtype=torch.int32)
    ref, unit = new(2, n, width, dtype=torch.float32)
    bias = new(n, width // SLICE.value, count, dtype=torch.float32)
    padded = _padded(count)
    slices = (n, width // SLICE.value)
    _start_kernel[slices](
        x, centroids, ref, unit, points, bias, sums, sizes[0], *shape, D=width, KP=padded, RANGE=RANGE_TOKENS
    )
    for turn in range(ITERATIONS):
        mine, other = sizes[turn % 2], sizes[(turn + 1) % 2]
        _assign_kernel[(n, triton.cdiv(sample, TILE))](
            x, ref, unit, points, bias, sums, mine, *shape,
            D=width, W=triton.next_power_of_2(width), KC=CENTROID_TILE, T=TILE, **LAUNCH,
        )  # fmt: skip
        _update_kernel[slices](
            centroids, ref, unit, points, bias, sums, mine, other, count, D=width, KP=padded, **SLICE_LAUNCH
        )
    return centroids


def round_codebook(centroids: torch.Tensor, moment: torch.Tensor | None) -> tuple[Codebook, Operands]:
    """The 4-bit codebook of centroids `[N, K, D]`, and operands weighted by the moment `[N, D, D]` of the queries."""
    n, count, width = centroids.shape
    book = Codebook(
        centroids.new_empty(n, count, width // 2, dtype=torch.uint8),
        centroids.new_empty(n, 2, width, dtype=torch.bfloat16),
    )
    return book, _operands(book, centroids, moment)


def codebook_operands(book: Codebook, moment: torch.Tensor | None) -> Operands:
    """Operands of a codebook that was learned before."""
    return _operands(book, None, moment)


def _operands(book: Codebook, centroids: torch.Tensor | None, moment: torch.Tensor | None) -> Operands:
    n, count, _ = book.codes.shape
    width = book.grid.shape[-1]
    new = book.grid.new_empty
    ref, weights = new(2, n, width, dtype=torch.float32)
    result = Operands(ref, new(n, count, width), new(n, width // SLICE.value, count, dtype=torch.float32), weights)
    unused = ref
    _book_kernel[(n, width // SLICE.value)](
        unused if centroids is None else centroids, unused if moment is None else moment,
        book.codes, book.grid, ref, result.points, result.bias, weights, count,
        D=width, W=triton.next_power_of_2(width), KP=_padded(count),
        LEARNED=centroids is not None, WEIGHTED=moment is not None,
    )  # fmt: skip
    return result

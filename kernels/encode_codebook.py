"""Codebooks: k-means over a scattered sample of tokens, 4-bit centroids, and what finding the nearest one needs.

Workspace of k-means: the sums of each program's share of the tokens, up to 33 MiB at 256 centroids of 128 channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..quantwm_core.codec.codebook import Codebook
from ..quantwm_core.codec.kmeans import ITERATIONS, WARM_ITERATIONS, scatter_step
from ..quantwm_core.methods.quantwm import SAMPLE_PER_CENTROID
from .encode_tiles import (
    SLICE,
    as_operand,
    centroid_bias,
    head_pointer,
    load_centroids,
    load_grid,
    round_bf16,
    round_even,
    round_to,
    with_index,
)
from .launching import launch
from .sizes import COUNTS, LENGTHS, ceil_div, next_power

TILE = 64
# Programs of a round that run at a time, one for each multiprocessor of a large GPU, and how often at the most.
PROGRAMS, WAVES = 132, 2
SLICE_LAUNCH = {"num_warps": 4}


@dataclass
class Operands:
    """What distances to the centroids of a codebook are computed from; see `_store_operands`.

    points in the tokens' type `[N, K, D]`, bias float `[N, D / 16, K]`, weights float `[N, D]` (mean 1).
    """

    points: torch.Tensor
    bias: torch.Tensor
    weights: torch.Tensor


@triton.jit
def _store_operands(centroids, middle, weight, points, bias, n, part, count, D: tl.constexpr, KP: tl.constexpr):
    """A slice of what `bias - points . x` needs to be half the weighted distance |x - c|^2, up to a constant.

    x goes into that product as it is stored. Centroids enter less the middle of all of them, because rounding then
    moves them least, and the bias is taken from the rounded ones, so that both parts mean the same centroid.
    """
    index = tl.arange(0, KP)
    column = part * SLICE + tl.arange(0, SLICE)
    centred = centroids - middle[None, :]
    point = round_to(centred * weight[None, :], points.dtype.element_ty)
    pointer = points + (n * count + index)[:, None] * D + column[None, :]
    tl.store(pointer, point, mask=(index < count)[:, None])
    share = tl.sum((0.5 * centred + middle[None, :]) * point, axis=1)
    tl.store(bias + (n * (D // SLICE) + part) * count + index, share, mask=index < count)


@triton.jit(do_not_specialize=LENGTHS)
def _start_kernel(
    x, book, grid, centroids, middles, points, bias, tokens, heads, count, stride_b, stride_s, stride_h,
    D: tl.constexpr, KP: tl.constexpr, WARM: tl.constexpr,
):  # fmt: skip
    """Begin with an earlier codebook (WARM) or with evenly spaced tokens. One program a head and slice."""
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    index = tl.arange(0, KP)
    column = part * SLICE + tl.arange(0, SLICE)
    valid = (index < count)[:, None]
    if WARM:
        low, step = load_grid(grid, n, part * SLICE, D, SLICE)
        start = load_centroids(book, low, step, n, count, index, index < count, part * SLICE, D, SLICE)
    else:
        source = head_pointer(x, n, heads, stride_b, stride_h) + column[None, :]
        token = index.to(tl.int64) * tokens // count
        start = tl.load(source + token[:, None] * stride_s, mask=valid, other=0.0).to(tl.float32)
    high = tl.max(tl.where(valid, start, float("-inf")), axis=0)
    low = tl.min(tl.where(valid, start, float("inf")), axis=0)
    middle = low + 0.5 * (high - low)
    tl.store(middles + n * D + column, middle)
    tl.store(centroids + (n * count + index)[:, None] * D + column[None, :], start, mask=valid)
    one = tl.full((SLICE,), 1.0, tl.float32)
    _store_operands(start, middle, one, points, bias, n, part, count, D, KP)


@triton.jit
def _scattered(start, step, tokens, T: tl.constexpr):
    """Tokens int32 `[T]` of a sample (`kmeans.scattered_tokens`) from its item `start` on."""
    # Only the first needs a division in each tile: how far the others are from it is the same in all.
    hop = (tl.arange(0, T).to(tl.int64) * step % tokens).to(tl.int32)
    token = ((tl.zeros((1,), tl.int64) + start) * step % tokens).to(tl.int32) + hop
    return tl.where(token < tokens, token, token - tokens)


@triton.jit(do_not_specialize=[*COUNTS, "tokens", "step"])
def _round_kernel(
    x, points, bias, sums, sizes, tokens, heads, count, sample, step, share, stride_b, stride_s, stride_h,
    D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, T: tl.constexpr, WGMMA: tl.constexpr,
):  # fmt: skip
    """Sums and sizes of the clusters of a share of the sample; one program a head, share and C channels.

    Who belongs to which centroid is a matrix of zeros and ones, so that a matrix product adds the tokens up: always in
    the same order, and faster than additions in memory. With WGMMA that matrix is the right operand: as the left one
    it would come from registers, and then each product waits for the one before.
    """
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    index = tl.arange(0, KP)
    column = tl.arange(0, W)
    own = tl.program_id(2) * C + tl.arange(0, C)
    source = head_pointer(x, n, heads, stride_b, stride_h)
    mask = (index < count)[:, None] & (column < D)[None, :]
    operand = points + (n * count + index)[:, None] * D
    centred = as_operand(tl.load(operand + column[None, :], mask=mask, other=0.0))
    offset = centroid_bias(bias, n, count, index, D, W)
    total = tl.zeros((C, KP) if WGMMA else (KP, C), tl.float32)
    size = tl.zeros((KP,), tl.float32)
    for first in range(part * share, tl.minimum((part + 1) * share, sample), T):
        place = first + tl.arange(0, T)
        valid = place < sample
        rows = source + _scattered(first, step, tokens, T).to(tl.int64)[:, None] * stride_s
        value = as_operand(tl.load(rows + column[None, :], mask=valid[:, None] & (column < D)[None, :], other=0.0))
        dots = tl.dot(centred, tl.trans(value), input_precision="ieee")
        distance = with_index(offset[:, None] - dots, index[:, None])
        # Nothing equals NaN.
        nearest = tl.where(valid, tl.min(distance, axis=0), float("nan"))
        member = tl.where(distance == nearest[None, :], 1.0, 0.0)
        size += tl.sum(member, axis=1)
        mine = value
        if C != W:
            mine = as_operand(tl.load(rows + own[None, :], mask=valid[:, None] & (own < D)[None, :], other=0.0))
        member = member.to(mine.dtype)
        if WGMMA:
            total = tl.dot(tl.trans(mine), tl.trans(member), total, input_precision="ieee")
        else:
            total = tl.dot(member, mine, total, input_precision="ieee")
    row = (part.to(tl.int64) * tl.num_programs(0) + n) * count + index
    if WGMMA:
        total = tl.trans(total)
    tl.store(sums + row[:, None] * D + own[None, :], total, mask=(index < count)[:, None] & (own < D)[None, :])
    if tl.program_id(2) == 0:
        tl.store(sizes + row, size, mask=index < count)


@triton.jit(do_not_specialize=LENGTHS)
def _update_kernel(
    centroids, middles, points, bias, sums, sizes, count, parts, D: tl.constexpr, KP: tl.constexpr, PARTS: tl.constexpr
):
    """Centroids from the shares' sums, added up in order; an empty cluster keeps its centroid."""
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    index = tl.arange(0, KP)
    column = part * SLICE + tl.arange(0, SLICE)
    valid = (index < count)[:, None]
    total = tl.zeros((KP, SLICE), tl.float32)
    size = tl.zeros((KP,), tl.float32)
    for share in tl.static_range(PARTS):
        row = (share * tl.num_programs(0) + n) * count + index
        real = share < parts
        total += tl.load(sums + row[:, None] * D + column[None, :], mask=valid & real, other=0.0)
        size += tl.load(sizes + row, mask=(index < count) & real, other=0.0)
    rows = (n * count + index)[:, None] * D + column[None, :]
    old = tl.load(centroids + rows, mask=valid, other=0.0)
    middle = tl.load(middles + n * D + column)
    new = tl.where((size > 0)[:, None], total / tl.maximum(size, 1.0)[:, None], old)
    tl.store(centroids + rows, new, mask=valid)
    one = tl.full((SLICE,), 1.0, tl.float32)
    _store_operands(new, middle, one, points, bias, n, part, count, D, KP)


@triton.jit
def _book_kernel(
    centroids, moment, book, grid, points, bias, weights, count,
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
    tl.store(weights + n * D + column, weight)
    _store_operands(rounded, low + 7.5 * step, weight, points, bias, n, part, count, D, KP)


def _padded(count: int) -> int:
    return max(16, next_power(count))


def learn_centroids(x: torch.Tensor, count: int, before: Codebook | None = None) -> torch.Tensor:
    """Centroids float `[N, K, D]` of `x` `[B, S, H, D]`: the twin of k-means in `methods.quantwm.learn_codebook`.

    before: a codebook to begin with.
    """
    batch, tokens, heads, width = x.shape
    n = batch * heads
    sample = min(tokens, SAMPLE_PER_CENTROID * count)
    padded, wide = _padded(count), next_power(width)
    # Channels whose sums one program holds. With 128 of them an RTX 4090 has too little shared memory, and for an A100
    # the compiler makes no use of registers.
    channels = min(wide, 128 if has_wgmma(x.device) else 64)
    share = _share(sample, n * (wide // channels))
    parts = ceil_div(sample, share)
    new, strides = x.new_empty, x.stride()[:3]
    centroids, points = new(n, count, width, dtype=torch.float32), new(n, count, width)
    middles = new(n, width, dtype=torch.float32)
    bias = new(n, width // SLICE.value, count, dtype=torch.float32)
    sums, sizes = new(parts, n, count, width, dtype=torch.float32), new(parts, n, count, dtype=torch.float32)
    slices = (n, width // SLICE.value)
    book, grid = (middles, middles) if before is None else (before.codes, before.grid)
    launch(
        _start_kernel, slices, (x, book, grid, centroids, middles, points, bias, tokens, heads, count, *strides),
        D=width, KP=padded, WARM=before is not None, **SLICE_LAUNCH,
    )  # fmt: skip
    for _ in range(ITERATIONS if before is None else WARM_ITERATIONS):
        launch(
            _round_kernel, (n, parts, wide // channels),
            (x, points, bias, sums, sizes, tokens, heads, count, sample, scatter_step(tokens), share, *strides),
            D=width, W=wide, C=channels, KP=padded, T=TILE, **_round_launch(padded, wide, x.device),
        )  # fmt: skip
        arguments = (centroids, middles, points, bias, sums, sizes, count, parts)
        launch(_update_kernel, slices, arguments, D=width, KP=padded, PARTS=next_power(parts), **SLICE_LAUNCH)
    return centroids


@lru_cache
def _share(sample: int, programs: int) -> int:
    """Tokens of a program, in whole tiles, if each share of a sample takes so many: those that end soonest."""

    def length(parts: int) -> int:
        return TILE * ceil_div(sample, TILE * parts)

    return length(
        min(
            range(1, max(1, WAVES * PROGRAMS // programs) + 1),
            # A program reads its head's centroids first, which takes about as long as a tile.
            key=lambda parts: ceil_div(programs * parts, PROGRAMS) * (length(parts) + TILE),
        )
    )


@lru_cache
def has_wgmma(device: torch.device) -> bool:
    """Whether Triton computes products by warp groups there, from operands in shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _round_launch(padded: int, wide: int, device: torch.device) -> dict:
    """A warp for each 32 centroids: their sums and distances just fit a thread's registers."""
    # Wider heads leave no shared memory for the matrix of zeros and ones.
    wgmma = wide <= 128 and has_wgmma(device)
    return {"WGMMA": wgmma, "num_warps": max(4, padded // 32), "num_stages": 3 if wgmma else 2}


def round_codebook(
    centroids: torch.Tensor, moment: torch.Tensor | None, dtype: torch.dtype
) -> tuple[Codebook, Operands]:
    """The 4-bit codebook of centroids `[N, K, D]`, and operands weighted by the moment `[N, D, D]` of the queries.

    dtype: the tokens' type.
    """
    n, count, width = centroids.shape
    book = Codebook(
        centroids.new_empty(n, count, width // 2, dtype=torch.uint8),
        centroids.new_empty(n, 2, width, dtype=torch.bfloat16),
    )
    return book, _operands(book, centroids, moment, dtype)


def codebook_operands(book: Codebook, moment: torch.Tensor | None, dtype: torch.dtype) -> Operands:
    """Operands of a codebook that was learned before, for tokens of type `dtype`."""
    return _operands(book, None, moment, dtype)


def _operands(
    book: Codebook, centroids: torch.Tensor | None, moment: torch.Tensor | None, dtype: torch.dtype
) -> Operands:
    n, count, _ = book.codes.shape
    width = book.grid.shape[-1]
    new = book.grid.new_empty
    bias = new(n, width // SLICE.value, count, dtype=torch.float32)
    result = Operands(new(n, count, width, dtype=dtype), bias, new(n, width, dtype=torch.float32))
    unused = bias
    arguments = (
        unused if centroids is None else centroids, unused if moment is None else moment,
        book.codes, book.grid, result.points, result.bias, result.weights, count,
    )  # fmt: skip
    launch(
        _book_kernel, (n, width // SLICE.value), arguments,
        D=width, W=next_power(width), KP=_padded(count),
        LEARNED=centroids is not None, WEIGHTED=moment is not None,
    )  # fmt: skip
    return result

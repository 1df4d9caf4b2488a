"""The nearest centroids of each token."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..quantwm_core.codec.qsac import BUCKETS
from .encode_codebook import Operands
from .encode_tiles import as_operand, centroid_bias, head_pointer, index_of
from .launching import launch
from .sizes import COUNTS, ceil_div, next_power

# Two programs, which hold a head's centroids each, for each multiprocessor of a large GPU.
TILE, PROGRAMS = 64, 264
LAUNCH = {"num_warps": 4}
# 64 KiB of 256 centroids stay in shared memory; the widest heads have twice that, more than most GPUs can hold.
WIDEST_HELD = 128
# Two to the 127th: farther than any centroid, and index 0 where only NaN was found.
FARTHEST = tl.constexpr(2.0**127)


@triton.jit
def _load_points(points, bias, n, count, first, D: tl.constexpr, W: tl.constexpr, KC: tl.constexpr):
    """Centroids from `first` on as an operand `[KC, W]`, and their bias `[KC]`."""
    index, column = first + tl.arange(0, KC), tl.arange(0, W)
    inside = (index < count)[:, None] & (column < D)[None, :]
    point = tl.load(points + (n * count + index)[:, None] * D + column[None, :], mask=inside, other=0.0)
    return as_operand(point), centroid_bias(bias, n, count, index, D, W)


@triton.jit
def _nearest_of(rows, point, offset, first, keep, BUCKET: tl.constexpr, T: tl.constexpr, KC: tl.constexpr):
    """Distance to the nearest centroid of each bucket, float32 `[T, BUCKET]`, with its number less the bucket's own.

    `keep` is -256, the bits of the distance that stay, as an argument: see `tiles.lane`.
    """
    dots = tl.dot(rows, tl.trans(point), input_precision="ieee")
    bits = tl.reshape((offset[None, :] - dots).to(tl.int32, bitcast=True), (T, KC // BUCKET, BUCKET))
    turn = first + tl.arange(0, KC // BUCKET) * BUCKET
    return tl.min(((bits & keep) | turn[None, :, None]).to(tl.float32, bitcast=True), axis=1)


@triton.jit(do_not_specialize=COUNTS)
def _nearest_kernel(
    x, points, bias, nearest_out, tokens, heads, count, share, stride_b, stride_s, stride_h, keep,
    D: tl.constexpr, W: tl.constexpr, KP: tl.constexpr, KC: tl.constexpr, BUCKET: tl.constexpr, T: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The nearest centroid in each of the CANDIDATES nearest buckets, a byte each, the nearest in the lowest.

    One program a head and share of tokens. Its centroids stay in shared memory, or come KC at a time for each tile.
    """
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, W)
    source = head_pointer(x, n, heads, stride_b, stride_h)
    if KC == KP:
        point, offset = _load_points(points, bias, n, count, 0, D, W, KC)
    for start in range(part * share, tl.minimum((part + 1) * share, tokens), T):
        token = start + tl.arange(0, T)
        inside = (token < tokens)[:, None] & (column < D)[None, :]
        place = source + token.to(tl.int64)[:, None] * stride_s + column[None, :]
        rows = as_operand(tl.load(place, mask=inside, other=0.0))
        if KC == KP:
            best = _nearest_of(rows, point, offset, 0, keep, BUCKET, T, KC)
        else:
            best = tl.full((T, BUCKET), FARTHEST, tl.float32)
            for first in range(0, count, KC):
                chunk, chunk_offset = _load_points(points, bias, n, count, first, D, W, KC)
                best = tl.minimum(best, _nearest_of(rows, chunk, chunk_offset, first, keep, BUCKET, T, KC))
        # All that competed for a bucket agree in the bucket's number, so it could wait until here.
        best = (best.to(tl.int32, bitcast=True) | tl.arange(0, BUCKET)[None, :]).to(tl.float32, bitcast=True)
        ids = tl.zeros((T,), tl.int32)
        taken = tl.zeros((T,), nearest_out.dtype.element_ty)
        for turn in tl.static_range(CANDIDATES):
            # NaN is never the lesser.
            nearest = tl.minimum(tl.min(best, axis=1), FARTHEST)
            # Tokens about as large as floats can be are farther from all centroids than what stands for none.
            ids = tl.where(nearest == FARTHEST, ids, tl.minimum(index_of(nearest), count - 1))
            taken |= ids.to(taken.dtype) << (8 * turn)
            best = tl.where(best == nearest[:, None], FARTHEST, best)
        tl.store(nearest_out + n * tokens + token, taken, mask=token < tokens)


def find_nearest(x: torch.Tensor, operands: Operands, nearest: torch.Tensor, candidates: int) -> None:
    """Write the numbers of the `candidates` centroids nearest to tokens `[B, S, H, D]` to `nearest` `[N, S]`."""
    _, tokens, heads, width = x.shape
    n, count, _ = operands.points.shape
    padded, wide = max(BUCKETS, next_power(count)), next_power(width)
    share, parts = shares(tokens, n, TILE, PROGRAMS)
    launch(
        _nearest_kernel, (n, parts),
        (x, operands.points, operands.bias, nearest, tokens, heads, count, share, *x.stride()[:3], -256),
        D=width, W=wide, KP=padded, KC=padded if wide <= WIDEST_HELD else BUCKETS, BUCKET=BUCKETS, T=TILE,
        CANDIDATES=candidates, num_stages=3 if large_blocks(x.device) else 2, **LAUNCH,
    )  # fmt: skip


def shares(tokens: int, heads: int, tile: int, programs: int) -> tuple[int, int]:
    """Tokens of a program, in whole tiles, and how many programs a head then has: all in all about `programs`."""
    tile = max(16, tile)  # Triton compiles apart for shares of which it does not know that they are aligned
    share = tile * ceil_div(tokens, tile * max(1, programs // heads))
    return share, ceil_div(tokens, share)


@lru_cache
def large_blocks(device: torch.device) -> bool:
    """Whether a block may have clearly more shared memory than the 99 KiB of a gaming GPU."""
    if device.type != "cuda":
        return False
    # Not every torch tells.
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) > 128 << 10

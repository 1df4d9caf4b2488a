"""Device functions of the encoder: tiles of keys or values, codebook rows, and the roundings of the eager twins."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# Operands of matrix products. The interpreter multiplies bfloat16 as the integers that it stores it in.
OPERAND = tl.constexpr(tl.float32 if os.environ.get("TRITON_INTERPRET") == "1" else tl.bfloat16)
# Channels that one program of a codebook kernel takes, and that error feedback rounds at a time.
SLICE = tl.constexpr(16)
LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def round_even(x):
    """Nearest integer, ties to even, of float32 below 2**22 in size."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_operand(x):
    """float32 rounded to the nearest bfloat16, as an operand of a matrix product."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def round_bf16(x):
    """float32 rounded to the nearest bfloat16, still float32."""
    return to_operand(x).to(tl.float32)


@triton.jit
def head_pointer(x, n, heads, stride_b, stride_h):
    """Start of head `n` (counted over batch and heads) of a tensor `[B, S, H, D]`."""
    return x + (n // heads).to(tl.int64) * stride_b + (n % heads).to(tl.int64) * stride_h


@triton.jit
def load_rows(pointer, tokens, valid, stride_s, D: tl.constexpr, W: tl.constexpr):
    """Channels of `[T]` tokens, float32 `[T, W]`; zero outside."""
    column = tl.arange(0, W)
    mask = valid[:, None] & (column < D)[None, :]
    return tl.load(pointer + tokens.to(tl.int64)[:, None] * stride_s + column[None, :], mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit
def load_grid(grid, n, first, D: tl.constexpr, W: tl.constexpr):
    """Lowest value and step, float32 `[W]` each, of a codebook's grid bf16 `[N, 2, D]`, from channel `first` on."""
    column = first + tl.arange(0, W)
    pointer = grid + n * 2 * D + column
    low = tl.load(pointer, mask=column < D, other=0.0).to(tl.float32)
    return low, tl.load(pointer + D, mask=column < D, other=0.0).to(tl.float32)


@triton.jit
def load_centroids(book, low, step, n, count, ids, valid, first, D: tl.constexpr, W: tl.constexpr):
    """Rows `ids` `[T]` of a 4-bit codebook uint8 `[N, K, D / 2]`, channels from `first` on, float32 `[T, W]`."""
    column = first // 2 + tl.arange(0, W // 2)
    mask = valid[:, None] & (column < D // 2)[None, :]
    rows = (n * count + ids)[:, None] * (D // 2)
    packed = tl.load(book + rows + column[None, :], mask=mask, other=0).to(tl.int32)
    codes = tl.reshape(tl.join(packed & 15, packed >> 4), (ids.shape[0], W))
    # At most 12 significant bits: exact, fused into one operation or not.
    return low[None, :] + step[None, :] * codes.to(tl.float32)


@triton.jit
def distance_keys(
    x, ref, operand, bias, n, count, D: tl.constexpr, W: tl.constexpr, KP: tl.constexpr, SLICES: tl.constexpr
):
    """Sortable keys int32 `[T, KP]` of the distances of `[T, W]` to all centroids; the low byte is the centroid.

    The order is that of `bias - (x - ref) . operand`: half the squared distance, but for what all centroids share.
    16 bits of it decide, ties go to the lower index.
    """
    column = tl.arange(0, W)
    index = tl.arange(0, KP)
    mask = (index < count)[:, None] & (column < D)[None, :]
    points = tl.load(operand + (n * count + index)[:, None] * D + column[None, :], mask=mask, other=0.0)
    half_norms = tl.zeros((KP,), tl.float32)
    for part in tl.static_range(SLICES):
        half_norms += tl.load(bias + (n * SLICES + part) * count + index, mask=index < count, other=0.0)
    product = tl.dot(to_operand(x - ref[None, :]), tl.trans(points.to(OPERAND)), input_precision="ieee")
    bits = (half_norms[None, :] - product).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & LARGEST)
    return tl.where((index < count)[None, :], (ordered & -256) | index[None, :], LARGEST)


@triton.jit
def log_code(top, scale, BITS: tl.constexpr, PER_OCTAVE: tl.constexpr):
    """Code int32 of scales that are stored as whole steps below `top`; the last code means zero."""
    zero_code: tl.constexpr = (1 << BITS) - 1
    positive = scale > 0
    octaves = tl.log2(tl.div_rn(top + tl.zeros_like(scale), tl.where(positive, scale, 1.0)))
    code = tl.minimum(tl.maximum(round_even(octaves * PER_OCTAVE), 0.0), zero_code)
    return tl.where(positive, code.to(tl.int32), zero_code)


@triton.jit
def largest_of_tiles(peaks, n, tiles):
    """The largest of a head's `tiles` values float32 `[N, tiles]`."""
    best = tl.zeros((1024,), tl.float32)
    for start in range(0, tiles, 1024):
        index = start + tl.arange(0, 1024)
        best = tl.maximum(best, tl.load(peaks + n * tiles + index, mask=index < tiles, other=0.0))
    return tl.max(best, axis=0)

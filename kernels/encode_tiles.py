"""Device functions of the encoder: tiles of keys or values, codebook rows, and the roundings of the eager twins."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import INTERPRETED

# Channels that one program of a codebook kernel takes.
SLICE = tl.constexpr(16)


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
def as_operand(x):
    """bf16 or fp16 values as they are, as an operand of a matrix product."""
    if INTERPRETED:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 rounded to bf16 or fp16 (there to what fits), still float32."""
    if dtype == tl.bfloat16:
        return round_bf16(x)
    else:
        return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(dtype).to(tl.float32)


@triton.jit
def round_bf16(x):
    """float32 rounded to the nearest bfloat16, still float32."""
    return to_operand(x).to(tl.float32)


@triton.jit
def head_pointer(x, n, heads, stride_b, stride_h):
    """Start of head `n` (counted over batch and heads) of a tensor `[B, S, H, D]`."""
    return x + (n // heads).to(tl.int64) * stride_b + (n % heads).to(tl.int64) * stride_h


@triton.jit
def load_grid(grid, n, first, D: tl.constexpr, W: tl.constexpr):
    """Lowest value and step, float32 `[W]` each, of a codebook's grid bf16 `[N, 2, D]`, from channel `first` on."""
    column = first + tl.arange(0, W)
    pointer = grid + n * 2 * D + column
    low = tl.load(pointer, mask=column < D, other=0.0).to(tl.float32)
    return low, tl.load(pointer + D, mask=column < D, other=0.0).to(tl.float32)


@triton.jit
def load_units(book, n, count, ids, valid, first, D: tl.constexpr, W: tl.constexpr):
    """Codes of rows `ids` `[T]` of a 4-bit codebook uint8 `[N, K, D / 2]`, as float32 `1 + code / 16` `[T, W]`.

    Written straight into the fraction of a float: conversions from integers are slow.
    """
    column = first // 2 + tl.arange(0, W // 2)
    mask = valid[:, None] & (column < D // 2)[None, :]
    rows = book + n * count * (D // 2) + ids[:, None] * (D // 2)
    packed = tl.load(rows + column[None, :], mask=mask, other=0).to(tl.int32)
    low = ((packed << 19) & 0x780000) | 0x3F800000
    high = ((packed << 15) & 0x780000) | 0x3F800000
    return tl.reshape(tl.join(low, high), (ids.shape[0], W)).to(tl.float32, bitcast=True)


@triton.jit
def load_centroids(book, low, step, n, count, ids, valid, first, D: tl.constexpr, W: tl.constexpr):
    """Rows `ids` `[T]` of a codebook, channels from `first` on, float32 `[T, W]`."""
    units = load_units(book, n, count, ids, valid, first, D, W)
    # Step times code has at most 12 significant bits, so this rounds once, as the eager twin does.
    codes = tl.fma(units, 16.0 + tl.zeros_like(units), -16.0 + tl.zeros_like(units))
    return tl.fma(step[None, :] + tl.zeros_like(units), codes, low[None, :] + tl.zeros_like(units))


@triton.jit
def centroid_bias(bias, n, count, index, D: tl.constexpr, W: tl.constexpr):
    """Sum of the shares `[D / SLICE, K]` of a head's bias for centroids `index`; far away where there is none."""
    part = tl.arange(0, W // SLICE)
    shares = bias + n * (D // SLICE) * count + part[:, None] * count + index[None, :]
    real = (part < D // SLICE)[:, None] & (index < count)[None, :]
    return tl.sum(tl.load(shares, mask=real, other=0.0), axis=0) + tl.where(index < count, 0.0, 1e37)


@triton.jit
def with_index(x, index):
    """float32 `x`, whose last eight bits are `index` instead, so that the least of many also says which one it is."""
    return ((x.to(tl.int32, bitcast=True) & -256) | index).to(tl.float32, bitcast=True)


@triton.jit
def index_of(x):
    """The index int32 that `with_index` put in."""
    return x.to(tl.int32, bitcast=True) & 255


@triton.jit
def log_code(top, scale, BITS: tl.constexpr, PER_OCTAVE: tl.constexpr):
    """Code int32 of scales that are stored as whole steps below `top`; the last code means zero."""
    zero_code: tl.constexpr = (1 << BITS) - 1
    positive = scale > 0
    octaves = tl.log2(tl.div_rn(top + tl.zeros_like(scale), tl.where(positive, scale, 1.0)))
    code = tl.minimum(tl.maximum(round_even(octaves * PER_OCTAVE), 0.0), zero_code)
    return tl.where(positive, code.to(tl.int32), zero_code)


@triton.jit
def largest_of_tiles(peaks, n, tiles, CHUNK: tl.constexpr):
    """The largest of a head's `tiles` values float32 `[N, tiles]`, CHUNK at a time."""
    best = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, tiles, CHUNK):
        index = start + tl.arange(0, CHUNK)
        best = tl.maximum(best, tl.load(peaks + n * tiles + index, mask=index < tiles, other=0.0))
    return tl.max(best, axis=0)

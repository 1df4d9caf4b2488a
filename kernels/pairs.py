"""Device functions: bfloat16 or float16 values two at a time, as the halves of an int32; the lower half comes first."""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from .tiles import INTERPRETED


def _bfloat16(value: float) -> tl.constexpr:
    """Bit pattern of a pair of equal numbers that bfloat16 holds exactly, an int32."""
    (bits,) = struct.unpack(">H", struct.pack(">f", value)[:2])
    return tl.constexpr(struct.unpack(">i", struct.pack(">HH", bits, bits))[0])


def _float16(value: float) -> tl.constexpr:
    """The same of float16."""
    return tl.constexpr(struct.unpack(">i", struct.pack(">ee", value, value))[0])


UPPER = tl.constexpr(-65536)
# In these numbers the last bit of a half counts one; see `_lift`. They come as an argument, `lifted`, as `one` does for
# `tiles.lane`.
LIFTED, LIFTED_16 = _bfloat16(128.0), _float16(1024.0)
ONE, ONE_16 = _bfloat16(1.0), _float16(1.0)
HALF, HALF_16 = _bfloat16(0.5), _float16(0.5)
SIXTEENTH, SIXTEENTH_16 = _bfloat16(0.0625), _float16(0.0625)
# Added then: minus what the lifting number has become, and minus the middle of the codes, but for a centroid's.
LESS_2_BITS, LESS_2_BITS_16 = _bfloat16(-128.0 - 3), _float16(-1024.0 - 3)
LESS_SHRUNK, LESS_SHRUNK_16 = _bfloat16(-8.0 - 3), _float16(-64.0 - 3)
LESS_4_BITS, LESS_4_BITS_16 = _bfloat16(-128.0 - 15), _float16(-1024.0 - 15)
LESS_HALVED, LESS_HALVED_16 = _bfloat16(-64.0), _float16(-512.0)


@triton.jit
def halves(x, FLOAT16: tl.constexpr):
    """The lower and the upper half of pairs, float32."""
    if FLOAT16:
        low, high = x.to(tl.int16), (x >> 16).to(tl.int16)
        return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (x << 16).to(tl.float32, bitcast=True), (x & UPPER).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x, FLOAT16: tl.constexpr):
    """float32 rounded to the nearest float of 16 bits, as the lower half of an int32."""
    if FLOAT16:
        return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def pair(low, high, FLOAT16: tl.constexpr):
    """Pairs of float32, each rounded to the nearest."""
    if INTERPRETED:
        return _rounded(low, FLOAT16) | (_rounded(high, FLOAT16) << 16)
    else:
        convert: tl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;" if FLOAT16 else "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(convert, "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def as_float16(x):
    """Pairs of bfloat16 as pairs of float16, cut to what float16 holds."""
    low, high = halves(x, False)
    if INTERPRETED:
        return pair(tl.clamp(low, -65504.0, 65504.0), tl.clamp(high, -65504.0, 65504.0), True)
    else:
        # Rounded towards zero no number becomes infinite, and all others but the very smallest are exact anyway.
        return tl.inline_asm_elementwise(
            "cvt.rz.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def fma2(a, b, c, FLOAT16: tl.constexpr):
    """a b + c of both halves, rounded once."""
    if INTERPRETED:
        a_low, a_high = halves(a, FLOAT16)
        b_low, b_high = halves(b, FLOAT16)
        c_low, c_high = halves(c, FLOAT16)
        return pair(a_low * b_low + c_low, a_high * b_high + c_high, FLOAT16)
    else:
        add: tl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;" if FLOAT16 else "fma.rn.bf16x2 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(add, "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _lift(x, MASK: tl.constexpr, lifted, FACTOR: tl.constexpr, LESS: tl.constexpr, FLOAT16: tl.constexpr):
    """What MASK leaves of both halves, as numbers: (128, or 1024 of float16, + it) FACTOR + LESS, exactly."""
    x = (x & MASK) | lifted
    return fma2(x, tl.full(x.shape, FACTOR, tl.int32), tl.full(x.shape, LESS, tl.int32), FLOAT16)


@triton.jit
def _in_order(first, second, third, fourth):
    """`[T, N]` four times -> `[T, 4 N]`, one of each in turn."""
    quads = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(quads, (first.shape[0], 4 * first.shape[1]))


@triton.jit
def _bytes(a, b, BYTE: tl.constexpr):
    """Byte BYTE of `a` and of `b` as the lower bytes of the two halves; above them stands anything."""
    if INTERPRETED:
        return ((a >> (8 * BYTE)) & 0xFF) | ((b >> (8 * BYTE)) & 0xFF) << 16
    else:
        # Four bytes are picked by their numbers among the eight of `a` and `b`, in this order.
        ask: tl.constexpr = 0x4400 + 0x1111 * BYTE
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,n", [a, b, ask], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def two_bit_pairs(x, lifted, FLOAT16: tl.constexpr):
    """Eight codes in the lower half of int32 `[T, N]`, as 2 code - 3: pairs `[T, 4 N]`."""
    one: tl.constexpr = ONE_16 if FLOAT16 else ONE
    sixteenth: tl.constexpr = SIXTEENTH_16 if FLOAT16 else SIXTEENTH
    less: tl.constexpr = LESS_2_BITS_16 if FLOAT16 else LESS_2_BITS
    less_shrunk: tl.constexpr = LESS_SHRUNK_16 if FLOAT16 else LESS_SHRUNK
    even, odd = x << 1, x >> 1
    near = _bytes(even, odd, 0)
    far = _bytes(even, odd, 1)
    return _in_order(
        _lift(near, 0x00060006, lifted, one, less, FLOAT16),
        _lift(near, 0x00600060, lifted, sixteenth, less_shrunk, FLOAT16),
        _lift(far, 0x00060006, lifted, one, less, FLOAT16),
        _lift(far, 0x00600060, lifted, sixteenth, less_shrunk, FLOAT16),
    )


@triton.jit
def _four_bits(x, lifted, FACTOR: tl.constexpr, LESS: tl.constexpr, FLOAT16: tl.constexpr):
    """Eight codes in int32 `[T, N]`, as `_lift` does with twice the code: pairs `[T, 4 N]`."""
    even, odd = x << 1, x >> 3
    return _in_order(
        _lift(_bytes(even, odd, 0), 0x001E001E, lifted, FACTOR, LESS, FLOAT16),
        _lift(_bytes(even, odd, 1), 0x001E001E, lifted, FACTOR, LESS, FLOAT16),
        _lift(_bytes(even, odd, 2), 0x001E001E, lifted, FACTOR, LESS, FLOAT16),
        _lift(_bytes(even, odd, 3), 0x001E001E, lifted, FACTOR, LESS, FLOAT16),
    )


@triton.jit
def four_bit_pairs(x, lifted, FLOAT16: tl.constexpr):
    """Eight codes in int32 `[T, N]`, as 2 code - 15: pairs `[T, 4 N]`."""
    one: tl.constexpr = ONE_16 if FLOAT16 else ONE
    less: tl.constexpr = LESS_4_BITS_16 if FLOAT16 else LESS_4_BITS
    return _four_bits(x, lifted, one, less, FLOAT16)


@triton.jit
def centroid_pairs(x, lifted, FLOAT16: tl.constexpr):
    """Eight codes of 4 bits in int32 `[T, N]`, as they are: pairs `[T, 4 N]`."""
    half: tl.constexpr = HALF_16 if FLOAT16 else HALF
    less: tl.constexpr = LESS_HALVED_16 if FLOAT16 else LESS_HALVED
    return _four_bits(x, lifted, half, less, FLOAT16)

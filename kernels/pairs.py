"""Device functions: bfloat16 values two at a time, as the halves of an int32; the lower half comes first in memory."""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from .tiles import INTERPRETED


def _twice(value: float) -> tl.constexpr:
    """Bit pattern of a pair of equal numbers that bfloat16 holds exactly, an int32."""
    (bits,) = struct.unpack(">H", struct.pack(">f", value)[:2])
    return tl.constexpr(struct.unpack(">i", struct.pack(">HH", bits, bits))[0])


UPPER = tl.constexpr(-65536)
ONE = _twice(1.0)
HALF = _twice(0.5)
SIXTEENTH = _twice(0.0625)
# 128 counts ones in its last bits; see `_lift`. It comes as an argument, `lifted`, as `one` does for `tiles.lane`.
LIFTED = _twice(128.0)
MINUS_11 = _twice(-11.0)
MINUS_64 = _twice(-64.0)
MINUS_131 = _twice(-131.0)
MINUS_143 = _twice(-143.0)


@triton.jit
def halves(x):
    """The lower and the upper half of pairs, float32."""
    return (x << 16).to(tl.float32, bitcast=True), (x & UPPER).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x):
    """float32 rounded to the nearest bfloat16, as the upper half of an int32."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & UPPER


@triton.jit
def pair(low, high):
    """Pairs of float32, each rounded to the nearest bfloat16."""
    if INTERPRETED:
        return ((_rounded(low) >> 16) & 0xFFFF) | _rounded(high)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def fma2(a, b, c):
    """a b + c of both halves, rounded once."""
    if INTERPRETED:
        a_low, a_high = halves(a)
        b_low, b_high = halves(b)
        c_low, c_high = halves(c)
        return pair(a_low * b_low + c_low, a_high * b_high + c_high)
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _lift(x, MASK: tl.constexpr, lifted, FACTOR: tl.constexpr, LESS: tl.constexpr):
    """What MASK leaves of both halves, as numbers: (128 + it) FACTOR + LESS, exactly."""
    x = (x & MASK) | lifted
    return fma2(x, tl.full(x.shape, FACTOR, tl.int32), tl.full(x.shape, LESS, tl.int32))


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
def two_bit_pairs(x, lifted):
    """Eight codes in the lower half of int32 `[T, N]`, as 2 code - 3: pairs `[T, 4 N]`."""
    even, odd = x << 1, x >> 1
    near = _bytes(even, odd, 0)
    far = _bytes(even, odd, 1)
    return _in_order(
        _lift(near, 0x00060006, lifted, ONE, MINUS_131),
        _lift(near, 0x00600060, lifted, SIXTEENTH, MINUS_11),
        _lift(far, 0x00060006, lifted, ONE, MINUS_131),
        _lift(far, 0x00600060, lifted, SIXTEENTH, MINUS_11),
    )


@triton.jit
def four_bit_pairs(x, lifted, FACTOR: tl.constexpr, LESS: tl.constexpr):
    """Eight codes in int32 `[T, N]`, as (128 + 2 code) FACTOR + LESS: pairs `[T, 4 N]`."""
    even, odd = x << 1, x >> 3
    return _in_order(
        _lift(_bytes(even, odd, 0), 0x001E001E, lifted, FACTOR, LESS),
        _lift(_bytes(even, odd, 1), 0x001E001E, lifted, FACTOR, LESS),
        _lift(_bytes(even, odd, 2), 0x001E001E, lifted, FACTOR, LESS),
        _lift(_bytes(even, odd, 3), 0x001E001E, lifted, FACTOR, LESS),
    )

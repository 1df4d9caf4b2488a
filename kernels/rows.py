"""Device functions: which tokens a program decodes, and rows in full precision, copied, turned by RoPE and stored."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import COS, RAW, RAW_B, RAW_H, RAW_S, SIN


@triton.jit
def own_head(entries):
    """(batch entry, head in it, side) of a program of the grid (heads, chunks, sides times batch entries).

    Side 0 is keys, which come first, because they take longer: what is left at the end, when programs are too few, is
    short. Values may be up to four sides more, a part of the chunk each.
    """
    place = tl.program_id(2)
    # Not a division, which all that is read would have to wait for.
    side = (place >= entries).to(tl.int32) + (place >= 2 * entries) + (place >= 3 * entries) + (place >= 4 * entries)
    return (place - side * entries).to(tl.int64), tl.program_id(0).to(tl.int64), side


@triton.jit
def store_tile(target, stride, local, valid, value, D: tl.constexpr, W: tl.constexpr):
    """Write `[T, W]` as rows of D channels."""
    column = tl.arange(0, W)
    mask = valid[:, None]
    if D < W:
        mask = mask & (column < D)[None, :]
    tl.store(target + local[:, None] * stride + column[None, :], value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def copy_chunk(source, source_stride, target, target_stride, count, D: tl.constexpr, W: tl.constexpr, T: tl.constexpr):
    """Copy `count` rows of D channels."""
    column = tl.arange(0, W)
    for first in range(0, count, T):
        token = first + tl.arange(0, T)
        mask = (token < count)[:, None] & (column < D)[None, :]
        x = tl.load(source + token[:, None] * source_stride + column[None, :], mask=mask, other=0.0)
        tl.store(target + token[:, None] * target_stride + column[None, :], x, mask=mask)


@triton.jit
def turn(row, first, tokens, valid, keys, D: tl.constexpr, W: tl.constexpr, T: tl.constexpr):
    """RoPE of keys float32 `[T, W]` at `tokens`, counted from `first`; as they are where the piece has no angles."""
    pair = tl.arange(0, W // 2)
    cosines = tl.load(row + COS).to(tl.pointer_type(tl.float32)) + first * (D // 2)
    sines = tl.load(row + SIN).to(tl.pointer_type(tl.float32)) + first * (D // 2)
    mask = valid[:, None] & (pair < D // 2)[None, :] & (tl.load(row + COS) != 0)
    offset = tokens[:, None] * (D // 2) + pair[None, :]
    cos = tl.load(cosines + offset, mask=mask, other=1.0)
    sin = tl.load(sines + offset, mask=mask, other=0.0)
    a, b = tl.split(tl.reshape(keys, (T, W // 2, 2)))
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (T, W))


@triton.jit
def turn_chunk(
    row, first, source, source_stride, target, target_stride, count, D: tl.constexpr, W: tl.constexpr, T: tl.constexpr
):
    """Copy `count` rows of D channels, from token `first` of a piece on, with RoPE."""
    column = tl.arange(0, W)
    for start in range(0, count, T):
        token = start + tl.arange(0, T)
        valid = token < count
        mask = valid[:, None] & (column < D)[None, :]
        x = tl.load(source + token[:, None] * source_stride + column[None, :], mask=mask, other=0.0)
        turned = turn(row, first, token, valid, x.to(tl.float32), D, W, T)
        store_tile(target, target_stride, token, valid, turned, D, W)


@triton.jit
def copy_stored_chunk(
    row, SIDE_: tl.constexpr, batch, h, first, count, target, target_stride,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Copy `count` rows of a piece that keeps its keys or values in full precision, from token `first` on."""
    source = tl.load(row + SIDE_ + RAW).to(tl.pointer_type(target.dtype.element_ty))
    stride = tl.load(row + SIDE_ + RAW_S).to(tl.int32)
    source += batch * tl.load(row + SIDE_ + RAW_B) + first * stride + h * tl.load(row + SIDE_ + RAW_H)
    if TURNED:
        turn_chunk(row, first, source, stride, target, target_stride, count, D, W, T)
    else:
        copy_chunk(source, stride, target, target_stride, count, D, W, T)

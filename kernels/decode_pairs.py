"""decode_layer for `quantwm` in bfloat16 or float16, the usual case: two channels an instruction.

A tile is pairs `[C T, S / 2]`: the first S channels of T tokens, then the next S. Without a correction S is all of a
token's, so that one read or write is of few tokens. With one it is 32, as a matrix unit gives out its results if the
columns of a product come in the order of `_column`. Either way one warp holds it, and nothing changes its place.
The centroid and its sum with the residual are rounded to the result's type, where `tiles` rounds only the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pairs import as_float16, centroid_pairs, fma2, four_bit_pairs, halves, pair, two_bit_pairs
from .tiles import (
    COS,
    GRID,
    OPERAND,
    PSAC_U,
    SIN,
    fetch_rows,
    finish_rows,
    log_scale,
    open_correction,
    open_side,
)

# What one warp and a product of a matrix unit take at once.
TILE = 16
# Rows of a tile times channels in each that a warp has in one read or write, eight channels a thread.
AT_ONCE = tl.constexpr(256)


@triton.jit
def _each_part(x, C: tl.constexpr):
    """Values of tokens `[T]`, for the rows of a tile: `[C T]`."""
    return tl.reshape(tl.broadcast_to(x[None, :], (C, x.shape[0])), (C * x.shape[0],))


@triton.jit
def _each_token(x, T: tl.constexpr, C: tl.constexpr):
    """Values of channels, for the few tokens of one read: `[C G, N]` -> `[C T, N]`."""
    G: tl.constexpr = x.shape[0] // C
    N: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(tl.reshape(x, (C, 1, G, N)), (C, T // G, G, N)), (C * T, N))


@triton.jit
def _columns(N: tl.constexpr, C: tl.constexpr, T: tl.constexpr):
    """Number of each column among all of a token, N in each of C parts: int32 `[C T, N]`."""
    return (tl.arange(0, C * T) // T * N)[:, None] + tl.arange(0, N)[None, :]


@triton.jit
def open_pairs(
    row, SIDE_: tl.constexpr, head, first, D: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr
):
    """Addresses (at token `first`) and constants of one head's keys or values in one span.

    Returns (codes, scales, ids, book, half of the scales' factor, the codebook's grid in pairs).
    """
    codes, scales, _, ids, book, top, _, _ = open_side(row, SIDE_, head, first, D, W, BITS, GROUP, True, True, 0)
    grid = tl.load(row + SIDE_ + GRID).to(tl.pointer_type(tl.bfloat16)) + head * (2 * D)
    grid = tl.multiple_of(grid.to(tl.pointer_type(tl.int32)), 16)
    return codes, scales, ids, book, top * 0.5, grid


@triton.jit
def load_grid(grid, D: tl.constexpr, W: tl.constexpr, S: tl.constexpr, FLOAT16: tl.constexpr):
    """Lowest values and steps of a codebook's grid, int32 `[C G, S / 2]`: G times, for a thread to have its own."""
    column = _columns(S // 2, W // S, AT_ONCE // S)
    low = tl.load(grid + column, mask=column < D // 2, other=0)
    step = tl.load(grid + D // 2 + column, mask=column < D // 2, other=0)
    if FLOAT16:
        low, step = as_float16(low), as_float16(step)
    return low, step


@triton.jit
def fetch_ids(side, tokens, count):
    """Centroids of tokens `[T]`, counted from where `side` was opened."""
    return tl.load(side[2] + tokens, mask=tokens < count, other=0).to(tl.int32)


@triton.jit
def _fetch_eights(pointer, rows, valid, D: tl.constexpr, W: tl.constexpr, S: tl.constexpr, BYTES: tl.constexpr):
    """Words of BYTES bytes that hold eight channels each, of rows `[T]`: int32 `[C T, S / 8]`."""
    # One word a thread, as it writes the eight channels: wider reads would have to change hands.
    column = tl.max_contiguous(_columns(S // 8, W // S, rows.shape[0]), (1, 1))
    if BYTES == 2:
        pointer = tl.multiple_of(pointer.to(tl.pointer_type(tl.uint16)), 2)
    else:
        pointer = tl.multiple_of(pointer.to(tl.pointer_type(tl.int32)), 4)
    mask = _each_part(valid, W // S)[:, None]
    if D < W:
        mask = mask & (column < D // 8)
    return tl.load(pointer + _each_part(rows, W // S)[:, None] * (D // 8) + column, mask=mask, other=0).to(tl.int32)


@triton.jit
def _fetch(
    side, correction, tokens, count, ids,
    D: tl.constexpr, W: tl.constexpr, S: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    RANK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """What tokens `[T]` store, for `_finish`: codes, scales, centroids, coefficients and their scales as they lie."""
    groups: tl.constexpr = (D + GROUP - 1) // GROUP
    scale_bits: tl.constexpr = 4 if BITS == 2 else 8
    width: tl.constexpr = (groups * scale_bits + 7) // 8
    valid = tokens < count
    code = _fetch_eights(side[0], tokens, valid, D, W, S, BITS)
    centroid = _fetch_eights(side[3], ids, valid, D, W, S, 4)
    group = tl.arange(0, W // GROUP if W > GROUP else 1)
    mask = valid[:, None] & (group < groups)[None, :]
    scale = tl.load(side[1] + tokens[:, None] * width + (group * scale_bits // 8)[None, :], mask=mask, other=0)
    rows, unit = code, scale
    if RANK:
        rows, unit = fetch_rows(correction, tokens, valid, RANK, R, True, True)
    return code, scale, centroid, rows, unit


@triton.jit
def _spread(per_group, T: tl.constexpr, W: tl.constexpr, S: tl.constexpr):
    """`[T, G]` -> `[C T, S / 2]`: every pair gets its group's value."""
    C: tl.constexpr = W // S
    G: tl.constexpr = per_group.shape[1]
    if G <= C:
        wide = tl.broadcast_to(tl.trans(per_group)[:, None, :, None], (G, C // G, T, S // 2))
    else:
        parts: tl.constexpr = G // C
        by_part = tl.permute(tl.reshape(per_group, (T, C, parts)), (1, 0, 2))
        wide = tl.broadcast_to(by_part[:, :, :, None], (C, T, parts, S // 2 // parts))
    return tl.reshape(wide, (C * T, S // 2))


@triton.jit
def finish_pairs(
    grid, top, code, scale, centroid, lifted,
    W: tl.constexpr, S: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FLOAT16: tl.constexpr,
):  # fmt: skip
    """Centroid plus residual, a tile of pairs; `grid` and `top` as `load_grid` and `open_pairs` give them."""
    low, step = grid
    G: tl.constexpr = W // GROUP if W > GROUP else 1
    scale_bits: tl.constexpr = 4 if BITS == 2 else 8
    shift = tl.arange(0, G) * scale_bits % 8
    scale_code = (scale.to(tl.int32) >> shift[None, :]) & ((1 << scale_bits) - 1)
    factor = log_scale(scale_code, scale_bits, 2 if BITS == 2 else 16) * top
    if BITS == 2:
        unit = two_bit_pairs(code, lifted, FLOAT16)
    else:
        unit = four_bit_pairs(code, lifted, FLOAT16)
    low, step = _each_token(low, T, W // S), _each_token(step, T, W // S)
    base = fma2(centroid_pairs(centroid, lifted, FLOAT16), step, low, FLOAT16)
    return fma2(unit, _spread(pair(factor, factor, FLOAT16), T, W, S), base, FLOAT16)


@triton.jit
def store_pairs(target, stride, tokens, count, value, D: tl.constexpr, W: tl.constexpr, S: tl.constexpr):
    """Write a tile as rows of D channels, `stride` pairs apart."""
    column = _columns(S // 2, W // S, tokens.shape[0])
    mask = _each_part(tokens < count, W // S)[:, None]
    if D < W:
        mask = mask & (column < D // 2)
    tl.store(target + _each_part(tokens, W // S)[:, None] * stride + column, value, mask=mask)


@triton.jit
def _column(place):
    """Channel of column `place` of a product: a thread's results are then eight channels in a row of each 32."""
    return (place & -32) + ((place >> 1) & 3) * 8 + ((place >> 3) & 3) * 2 + (place & 1)


@triton.jit
def load_basis(row, head, D: tl.constexpr, W: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr):
    """The correction's basis bf16 `[R, W]` in the order of `_column`; zero where there is none."""
    channel = _column(tl.arange(0, W))
    rank = tl.arange(0, R)
    address = tl.load(row + PSAC_U)
    basis = address.to(tl.pointer_type(tl.bfloat16)) + head * (D * RANK)
    inside = (address != 0) & (channel < D)[:, None] & (rank < RANK)[None, :]
    return tl.trans(tl.load(basis + channel[:, None] * RANK + rank[None, :], mask=inside, other=0.0).to(OPERAND))


@triton.jit
def correct_pairs(
    correction, basis, codes, scale, one, value,
    T: tl.constexpr, W: tl.constexpr, R: tl.constexpr, FLOAT16: tl.constexpr,
):  # fmt: skip
    """`value` plus C U^T, a tile of pairs whose rows are 32 channels."""
    short, unit = finish_rows(correction, codes, scale, one, T, R, True)
    along = tl.dot(short.to(OPERAND), basis, out_dtype=tl.float32)
    parts = tl.permute(tl.reshape(along, (T, W // 32, 4, 4, 2)), (1, 0, 3, 2, 4))
    even, odd = tl.split(tl.reshape(parts, (W // 32 * T, 16, 2)))
    unit = _each_part(pair(unit, unit, FLOAT16), W // 32)[:, None]
    return fma2(pair(even, odd, FLOAT16), tl.broadcast_to(unit, value.shape), value, FLOAT16)


@triton.jit
def _turn(row, first, tokens, count, value, D: tl.constexpr, W: tl.constexpr, S: tl.constexpr, FLOAT16: tl.constexpr):
    """RoPE of keys at `tokens`, counted from `first`; as they are where the piece has no angles."""
    cosines = tl.multiple_of(tl.load(row + COS).to(tl.pointer_type(tl.float32)) + first * (D // 2), 16)
    sines = tl.multiple_of(tl.load(row + SIN).to(tl.pointer_type(tl.float32)) + first * (D // 2), 16)
    column = _columns(S // 2, W // S, tokens.shape[0])
    mask = _each_part(tokens < count, W // S)[:, None] & (column < D // 2) & (tl.load(row + COS) != 0)
    offset = _each_part(tokens, W // S)[:, None] * (D // 2) + column
    cos = tl.load(cosines + offset, mask=mask, other=1.0)
    sin = tl.load(sines + offset, mask=mask, other=0.0)
    a, b = halves(value, FLOAT16)
    return pair(a * cos - b * sin, a * sin + b * cos, FLOAT16)


@triton.jit
def _finish(
    row, first, tokens, count, target, stride, side, grid, correction, basis, fetched, lifted, one,
    D: tl.constexpr, W: tl.constexpr, S: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    RANK: tl.constexpr, R: tl.constexpr, ROTATED: tl.constexpr, FLOAT16: tl.constexpr,
):  # fmt: skip
    """Decode and write a tile."""
    code, scale, centroid, rows, unit = fetched
    if RANK:
        # Read anew for each tile: kept, it would take a fifth of the registers, and more warps hide more.
        grid = load_grid(side[5], D, W, S, FLOAT16)
    value = finish_pairs(grid, side[4], code, scale, centroid, lifted, W, S, T, BITS, GROUP, FLOAT16)
    if ROTATED:
        value = _turn(row, first, tokens, count, value, D, W, S, FLOAT16)
    if RANK:
        value = correct_pairs(correction, basis, rows, unit, one, value, T, W, R, FLOAT16)
    store_pairs(target, stride, tokens, count, value, D, W, S)


@triton.jit
def decode_pairs_chunk(
    row, SIDE_: tl.constexpr, first, count, head, target, stride, lifted, one,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    RANK: tl.constexpr, R: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Keys or values of `count` tokens from `first` on; with a RANK, correction included.

    While a tile is worked on, the next one is read, and the centroid ids of the two after it. Two tiles a turn, so
    that what was read for one stays in its registers: moved to the other's, it would be waited for.
    """
    S: tl.constexpr = 32 if RANK else W
    FLOAT16: tl.constexpr = target.dtype.element_ty == tl.float16
    target = target.to(tl.pointer_type(tl.int32))
    stride = stride // 2
    tokens = tl.arange(0, T)
    side = open_pairs(row, SIDE_, head, first, D, W, BITS, GROUP)
    ids = fetch_ids(side, tokens, count)
    odd_ids = fetch_ids(side, tokens + T, count)
    even_ids = fetch_ids(side, tokens + 2 * T, count)
    correction = side
    basis = ids
    if RANK:
        # Without its basis, whose columns lie otherwise here; what is not used is not read.
        correction = open_correction(row, head, first, D, W, RANK, R, True, False)
    even = _fetch(side, correction, tokens, count, ids, D, W, S, BITS, GROUP, RANK, R)
    grid = side
    if RANK:
        basis = load_basis(row, head, D, W, RANK, R)
    else:
        grid = load_grid(side[5], D, W, S, FLOAT16)
    for offset in range(0, count, 2 * T):
        tokens = offset + tl.arange(0, T)
        odd = _fetch(side, correction, tokens + T, count, odd_ids, D, W, S, BITS, GROUP, RANK, R)
        odd_ids = fetch_ids(side, tokens + 3 * T, count)
        _finish(
            row, first, tokens, count, target, stride, side, grid, correction, basis, even,
            lifted, one, D, W, S, T, BITS, GROUP, RANK, R, ROTATED, FLOAT16,
        )  # fmt: skip
        even = _fetch(side, correction, tokens + 2 * T, count, even_ids, D, W, S, BITS, GROUP, RANK, R)
        even_ids = fetch_ids(side, tokens + 4 * T, count)
        _finish(
            row, first, tokens + T, count, target, stride, side, grid, correction, basis, odd,
            lifted, one, D, W, S, T, BITS, GROUP, RANK, R, ROTATED, FLOAT16,
        )  # fmt: skip

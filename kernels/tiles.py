"""Device functions: a tile of tokens from its stored form to float32, shared by the decode and attention kernels.

A tile is `[T, W]`: T tokens, W channels (the head width rounded up to a power of two). Reads beyond the span's tokens
or the head's channels are masked; what stands there is finite and never stored. Reading (`fetch_...`) and arithmetic
(`finish_...`) are apart, so that a loop can read the next tile while it works on this one.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from .tables import FIELDS, SIDE

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

TOKENS = tl.constexpr(FIELDS.index("tokens"))
START = tl.constexpr(FIELDS.index("start"))
PHASE = tl.constexpr(FIELDS.index("phase"))
ZEROS = tl.constexpr(FIELDS.index("zeros"))
# First field of each side; the fields of a side follow in the order of SIDE.
KEYS = tl.constexpr(FIELDS.index("k_codes"))
VALUES = tl.constexpr(FIELDS.index("v_codes"))
CODES = tl.constexpr(SIDE.index("codes"))
IDS = tl.constexpr(SIDE.index("ids"))
SCALES = tl.constexpr(SIDE.index("scales"))
TOP = tl.constexpr(SIDE.index("top"))
CENTROIDS = tl.constexpr(SIDE.index("centroids"))
GRID = tl.constexpr(SIDE.index("grid"))
COUNT = tl.constexpr(SIDE.index("count"))
LOW = tl.constexpr(SIDE.index("low"))
STAGES = tl.constexpr(SIDE.index("stages"))
RAW = tl.constexpr(SIDE.index("raw"))
RAW_B = tl.constexpr(SIDE.index("raw_b"))
RAW_S = tl.constexpr(SIDE.index("raw_s"))
RAW_H = tl.constexpr(SIDE.index("raw_h"))
PSAC_C = tl.constexpr(FIELDS.index("psac_c"))
PSAC_C_SCALES = tl.constexpr(FIELDS.index("psac_c_scales"))
PSAC_C_FACTOR = tl.constexpr(FIELDS.index("psac_c_factor"))
PSAC_U = tl.constexpr(FIELDS.index("psac_u"))
BITMAP = tl.constexpr(FIELDS.index("bitmap"))
ROWS = tl.constexpr(FIELDS.index("rows"))
ROW_COUNT = tl.constexpr(FIELDS.index("row_count"))
ROWS_BEFORE = tl.constexpr(FIELDS.index("rows_before"))
COS = tl.constexpr(FIELDS.index("cos"))
SIN = tl.constexpr(FIELDS.index("sin"))

# Operands of matrix products. The interpreter multiplies bfloat16 as the integers that it stores it in.
OPERAND = tl.constexpr(tl.float32 if INTERPRETED.value else tl.bfloat16)

# Row scales of INT4 coefficients, as quantwm_core.codec.psac stores them.
ROW_SCALE_PER_OCTAVE = tl.constexpr(16)
ROW_SCALE_ZERO = tl.constexpr(255)
# Added to the bit pattern of a float it makes it four times as large.
FOURFOLD = tl.constexpr(2 << 23)


@triton.jit
def lane(x, one, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """The BITS of `x` from bit SHIFT on, as the leading fraction bits of a float in [1, 2).

    `one` is the bit pattern of 1.0 as an argument: known to the compiler, it would cost an instruction more, because
    a three-way logical operation takes only one constant.
    """
    up: tl.constexpr = 23 - BITS - SHIFT
    mask: tl.constexpr = ((1 << BITS) - 1) << (23 - BITS)
    if up >= 0:
        moved = x << up
    else:
        moved = x >> -up
    return (moved & mask) | one


@triton.jit
def two_lanes(x, one, SHIFT: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr):
    return tl.join(lane(x, one, SHIFT, BITS), lane(x, one, SHIFT + STEP, BITS))


@triton.jit
def four_lanes(x, one, SHIFT: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr):
    return tl.join(two_lanes(x, one, SHIFT, 2 * STEP, BITS), two_lanes(x, one, SHIFT + STEP, 2 * STEP, BITS))


@triton.jit
def eight_lanes(x, one, SHIFT: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr):
    return tl.join(four_lanes(x, one, SHIFT, 2 * STEP, BITS), four_lanes(x, one, SHIFT + STEP, 2 * STEP, BITS))


@triton.jit
def unpack(packed, one, BITS: tl.constexpr, T: tl.constexpr, W: tl.constexpr):
    """Bytes or words `[T, ...]` -> float32 `1 + value / 2**BITS` `[T, W]`; the first value sits in the lowest bits.

    Two integer instructions a value and no conversion: decoding has time for about ten instructions a value.
    """
    x = packed.to(tl.int32)
    lanes: tl.constexpr = W // packed.shape[1]
    if lanes == 1:
        bits = lane(x, one, 0, BITS)
    if lanes == 2:
        bits = two_lanes(x, one, 0, BITS, BITS)
    if lanes == 4:
        bits = four_lanes(x, one, 0, BITS, BITS)
    if lanes == 8:
        bits = eight_lanes(x, one, 0, BITS, BITS)
    if lanes == 16:
        even = eight_lanes(x, one, 0, 2 * BITS, BITS)
        bits = tl.join(even, eight_lanes(x, one, BITS, 2 * BITS, BITS))
    return tl.reshape(bits, (T, W)).to(tl.float32, bitcast=True)


@triton.jit
def log_scale(code, BITS: tl.constexpr, PER_OCTAVE: tl.constexpr):
    """Factor below the largest scale; the last code means zero."""
    return tl.where(code == (1 << BITS) - 1, 0.0, tl.exp2(code.to(tl.float32) * (-1.0 / PER_OCTAVE)))


@triton.jit
def byte_pointer(row, field: tl.constexpr, offset):
    """Address of byte `offset` of a row's tensor."""
    return tl.load(row + field).to(tl.pointer_type(tl.uint8)) + offset


@triton.jit
def fetch_packed(
    pointer,
    rows,
    valid,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    W: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Packed values of rows `[T]` of WIDTH bytes each, for `unpack`: words of WORD bytes where they fit, else bytes."""
    word: tl.constexpr = WORD if ALIGNED and WIDTH % WORD == 0 and W * BITS >= 8 * WORD else 1
    if word == 4:
        pointer = tl.multiple_of(pointer.to(tl.pointer_type(tl.int32)), 16 if WIDTH % 16 == 0 else 4)
    if word == 2:
        pointer = tl.multiple_of(pointer.to(tl.pointer_type(tl.uint16)), 2)
    column = tl.arange(0, W * BITS // (8 * word))
    mask = valid[:, None]
    if WIDTH * 8 < W * BITS:
        mask = mask & (column < WIDTH // word)[None, :]
    return tl.load(pointer + rows[:, None] * (WIDTH // word) + column[None, :], mask=mask, other=0)


@triton.jit
def fetch_small(
    pointer,
    tokens,
    valid,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    FIRST_BIT: tl.constexpr,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
):
    """The bytes that hold GROUPS packed values a token, from bit FIRST_BIT of its WIDTH bytes on: uint8 `[T, G]`."""
    index = tl.arange(0, G)
    mask = valid[:, None] & (index < GROUPS)[None, :]
    return tl.load(pointer + tokens[:, None] * WIDTH + ((FIRST_BIT + index * BITS) // 8)[None, :], mask=mask, other=0)


@triton.jit
def small(byte, BITS: tl.constexpr, FIRST_BIT: tl.constexpr, G: tl.constexpr):
    """Values int32 `[T, G]` from what `fetch_small` read."""
    shift = (FIRST_BIT + tl.arange(0, G) * BITS) % 8
    return (byte.to(tl.int32) >> shift[None, :]) & ((1 << BITS) - 1)


@triton.jit
def spread(per_group, T: tl.constexpr, G: tl.constexpr, W: tl.constexpr):
    """`[T, G]` -> `[T, W]`: every channel gets its group's value."""
    return tl.reshape(tl.broadcast_to(per_group[:, :, None], (T, G, W // G)), (T, W))


@triton.jit
def open_side(
    row,
    SIDE_: tl.constexpr,
    head,
    first,
    D: tl.constexpr,
    W: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    MIDRISE: tl.constexpr,
    BOOK: tl.constexpr,
    ZEROS_WIDTH: tl.constexpr,
):
    """Addresses (at token `first`) and constants of one head's keys or values in one span: what its tiles share.

    Returns (codes, scales, zeros, ids, book, top, low, step): five addresses, the scales' factor, the codebook's grid.
    """
    groups: tl.constexpr = (D + GROUP - 1) // GROUP
    scale_bits: tl.constexpr = 4 if MIDRISE and BITS == 2 else 8
    item = head * tl.load(row + TOKENS) + first
    codes = byte_pointer(row, SIDE_ + CODES, item * ((D * BITS + 7) // 8))
    scales = byte_pointer(row, SIDE_ + SCALES, item * ((groups * scale_bits + 7) // 8))
    zeros = codes
    if not MIDRISE:
        zeros = byte_pointer(row, ZEROS, item * ZEROS_WIDTH)
    factor: tl.constexpr = tl.bfloat16 if MIDRISE else tl.float16
    top = tl.load(tl.load(row + SIDE_ + TOP).to(tl.pointer_type(factor)) + head).to(tl.float32)
    ids = codes
    book = codes
    low = tl.zeros((W,), tl.float32)
    step = low
    if BOOK:
        ids = byte_pointer(row, SIDE_ + IDS, item)
        book_width: tl.constexpr = (D + 1) // 2 if MIDRISE else 2 * D
        book = byte_pointer(row, SIDE_ + CENTROIDS, head * tl.load(row + SIDE_ + COUNT) * book_width)
    if BOOK and MIDRISE:
        grid = tl.load(row + SIDE_ + GRID).to(tl.pointer_type(tl.bfloat16)) + head * (2 * D)
        column = tl.arange(0, W)
        # Codes come as 1 + code / 16. Both are bf16, so that the difference is exact in float32.
        step = tl.load(grid + D + column, mask=column < D, other=0.0).to(tl.float32) * 16
        low = tl.load(grid + column, mask=column < D, other=0.0).to(tl.float32) - step
    return codes, scales, zeros, ids, book, top, low, step


@triton.jit
def fetch_ids(side, tokens, valid, BOOK: tl.constexpr):
    """Centroids of tokens `[T]`, counted from where `side` was opened."""
    ids = tokens
    if BOOK:
        ids = tl.load(side[3] + tokens, mask=valid, other=0).to(tl.int32)
    return ids


@triton.jit
def fetch_side(
    side,
    tokens,
    valid,
    ids,
    D: tl.constexpr,
    W: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    MIDRISE: tl.constexpr,
    BOOK: tl.constexpr,
    ZEROS_WIDTH: tl.constexpr,
    ZEROS_BIT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """What tokens `[T]` store, for `finish_side`: codes, scales, zero-points and centroids as they lie in memory."""
    codes, scales, zeros, _, book, _, _, _ = side
    groups: tl.constexpr = (D + GROUP - 1) // GROUP
    G: tl.constexpr = W // GROUP if W > GROUP else 1
    scale_bits: tl.constexpr = 4 if MIDRISE and BITS == 2 else 8
    code = fetch_packed(codes, tokens, valid, (D * BITS + 7) // 8, BITS, W, 4, ALIGNED)
    scale = fetch_small(scales, tokens, valid, (groups * scale_bits + 7) // 8, scale_bits, 0, groups, G)
    zero = scale
    if not MIDRISE:
        zero = fetch_small(zeros, tokens, valid, ZEROS_WIDTH, BITS, ZEROS_BIT, groups, G)
    centroid = code
    if BOOK:
        if MIDRISE:
            centroid = fetch_packed(book, ids, valid, (D + 1) // 2, 4, W, 4, ALIGNED)
        else:
            column = tl.arange(0, W)
            mask = valid[:, None] & (column < D)[None, :]
            rows = book.to(tl.pointer_type(tl.bfloat16)) + ids[:, None] * D
            centroid = tl.load(rows + column[None, :], mask=mask, other=0.0)
    return code, scale, zero, centroid


@triton.jit
def finish_side(
    side,
    code,
    scale,
    zero,
    centroid,
    one,
    W: tl.constexpr,
    T: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    MIDRISE: tl.constexpr,
    BOOK: tl.constexpr,
    ZEROS_BIT: tl.constexpr,
):
    """Centroid plus dequantized residual, float32 `[T, W]`."""
    _, _, _, _, _, top, low, step = side
    G: tl.constexpr = W // GROUP if W > GROUP else 1
    scale_bits: tl.constexpr = 4 if MIDRISE and BITS == 2 else 8
    # 1 + code / levels, so that every difference below is exact and a scale times it rounds as in the eager twin.
    levels: tl.constexpr = 1 << BITS
    unit = unpack(code, one, BITS, T, W)
    scale_code = small(scale, scale_bits, 0, G)
    if MIDRISE:
        factor = log_scale(scale_code, scale_bits, 2 if BITS == 2 else 16) * (top * levels)
        value = spread(factor, T, G, W) * (unit - (1 + (levels - 1) / 2 / levels))
    else:
        factor = scale_code.to(tl.float32) * (top * levels)
        offset = 1 + small(zero, BITS, ZEROS_BIT, G).to(tl.float32) / levels
        value = spread(factor, T, G, W) * (unit - spread(offset, T, G, W))
    if BOOK:
        if MIDRISE:
            value = low[None, :] + step[None, :] * unpack(centroid, one, 4, T, W) + value
        else:
            value = centroid.to(tl.float32) + value
    return value


@triton.jit
def open_correction(
    row,
    head,
    first,
    D: tl.constexpr,
    W: tl.constexpr,
    RANK: tl.constexpr,
    R: tl.constexpr,
    MIDRISE: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """What the tiles of one head from token `first` on share for C U^T; without a correction the basis is zero.

    Returns (coefficients, scales, factor, bitmap, present, basis bf16 `[R, W]`).
    """
    column = tl.arange(0, W)
    rank = tl.arange(0, R)
    tokens = tl.load(row + TOKENS)
    present = tl.load(row + PSAC_U) != 0
    basis = tl.load(row + PSAC_U).to(tl.pointer_type(tl.bfloat16)) + head * (D * RANK)
    inside = present & (rank < RANK)[:, None] & (column < D)[None, :]
    basis = tl.load(basis + column[None, :] * RANK + rank[:, None], mask=inside, other=0.0).to(OPERAND)
    bitmap = byte_pointer(row, BITMAP, head * ((tokens + 7) // 8) + first // 8)
    items = head * tokens + first
    address = tl.load(row + PSAC_C)
    if SPARSE:
        sparse = tl.load(row + BITMAP) != 0
        items = tl.where(sparse, head * tl.load(row + ROW_COUNT), items)
        address = tl.where(sparse, tl.load(row + ROWS), address)
    coefficients = address.to(tl.pointer_type(tl.uint8)) + items * ((RANK + 1) // 2 if MIDRISE else RANK)
    scales = byte_pointer(row, PSAC_C_SCALES, items * (1 if MIDRISE else 2))
    factor = 1.0
    if MIDRISE:
        factors = tl.load(row + PSAC_C_FACTOR).to(tl.pointer_type(tl.bfloat16))
        factor = tl.load(factors + head, mask=present, other=0.0).to(tl.float32)
    return coefficients, scales, factor, bitmap, present, basis


@triton.jit
def fetch_rows(
    correction, rows, kept, RANK: tl.constexpr, R: tl.constexpr, MIDRISE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Stored coefficients and scales of rows `[T]`, for `finish_rows`; tokens that are not `kept` get scale zero."""
    coefficients, scales, _, _, present, _ = correction
    kept = kept & present
    if MIDRISE:
        # Two bytes are what a thread of a matrix product takes of a row at once.
        codes = fetch_packed(coefficients, rows, kept, (RANK + 1) // 2, 4, R, 2, ALIGNED)
        scale = tl.load(scales + rows, mask=kept, other=ROW_SCALE_ZERO)
    else:
        rank = tl.arange(0, R)
        inside = kept[:, None] & (rank < RANK)[None, :]
        signed = coefficients.to(tl.pointer_type(tl.int8))
        codes = tl.load(signed + rows[:, None] * RANK + rank[None, :], mask=inside, other=0)
        scale = tl.load(scales.to(tl.pointer_type(tl.float16)) + rows, mask=kept, other=0.0)
    return codes, scale


@triton.jit
def finish_rows(correction, codes, scale, one, T: tl.constexpr, R: tl.constexpr, MIDRISE: tl.constexpr):
    """Coefficients in few bits, float32 `[T, R]`, and the unit float32 `[T]` that they count."""
    if MIDRISE:
        # Fourths, of four steps: a unit of sixteen is more than float16 holds for the largest keys.
        unit = log_scale(scale.to(tl.int32), 8, ROW_SCALE_PER_OCTAVE) * (correction[2] * 4)
        short = unpack(codes, one + FOURFOLD, 4, T, R) - 6.0
    else:
        unit = scale.to(tl.float32)
        short = codes.to(tl.float32)
    return short, unit


@triton.jit
def correct(correction, codes, scale, one, T: tl.constexpr, R: tl.constexpr, MIDRISE: tl.constexpr):
    """C U^T, float32 `[T, W]`.

    Coefficients of few bits and the bf16 basis are exact operands of a matrix product; the unit comes after it.
    """
    short, unit = finish_rows(correction, codes, scale, one, T, R, MIDRISE)
    return unit[:, None] * tl.dot(short.to(OPERAND), correction[5], out_dtype=tl.float32)

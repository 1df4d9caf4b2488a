"""Device functions: a tile of tokens from its stored form to float32, shared by the decode and attention kernels.

A tile is `[T, W]`: T tokens from `first` on, W channels (the head width rounded up to a power of two). Reads beyond
the span's tokens or the head's channels are masked; what stands there is finite and never stored.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from .tables import FIELDS, SIDE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

TOKENS = tl.constexpr(FIELDS.index("tokens"))
START = tl.constexpr(FIELDS.index("start"))
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

# Operands of matrix products. The interpreter multiplies bfloat16 as the integers that it stores it in.
OPERAND = tl.constexpr(tl.float32 if INTERPRETED else tl.bfloat16)

# Row scales of INT4 coefficients, as quantwm_core.codec.psac stores them.
ROW_SCALE_PER_OCTAVE = tl.constexpr(16)


@triton.jit
def byte_pointer(row, field: tl.constexpr, offset, ALIGNED: tl.constexpr, UNIT: tl.constexpr):
    """Address of byte `offset` (a multiple of UNIT) of a row's tensor."""
    pointer = tl.load(row + field).to(tl.pointer_type(tl.uint8)) + offset
    return tl.multiple_of(pointer, UNIT if ALIGNED else 1)


@triton.jit
def lane(x, one, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """The BITS of `x` from bit SHIFT on, as the leading fraction bits of a float in [1, 2).

    `one` is the bit pattern of 1.0 as an argument: known to the compiler, it would cost an instruction more, because
    a three-way logical operation takes only one constant.
    """
    up: tl.constexpr = 23 - BITS - SHIFT
    mask: tl.constexpr = ((1 << BITS) - 1) << (23 - BITS)
    return ((x << up) & mask) | one


@triton.jit
def unpack(packed, one, BITS: tl.constexpr, T: tl.constexpr, W: tl.constexpr):
    """Bytes `[T, W * BITS / 8]` -> float32 `1 + value / 2**BITS` `[T, W]`; the first value sits in the lowest bits.

    Two integer instructions a value and no conversion: decoding has time for about ten instructions a value.
    """
    x = packed.to(tl.int32)
    if BITS == 8:
        bits = lane(x, one, 0, 8)
    if BITS == 4:
        bits = tl.reshape(tl.join(lane(x, one, 0, 4), lane(x, one, 4, 4)), (T, W))
    if BITS == 2:
        even = tl.join(lane(x, one, 0, 2), lane(x, one, 4, 2))
        odd = tl.join(lane(x, one, 2, 2), lane(x, one, 6, 2))
        bits = tl.reshape(tl.join(even, odd), (T, W))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def log_scale(code, BITS: tl.constexpr, PER_OCTAVE: tl.constexpr):
    """Factor below the largest scale; the last code means zero."""
    return tl.where(code == (1 << BITS) - 1, 0.0, tl.exp2(code.to(tl.float32) * (-1.0 / PER_OCTAVE)))


@triton.jit
def load_codes(pointer, tokens, valid, one, WIDTH: tl.constexpr, BITS: tl.constexpr, T: tl.constexpr, W: tl.constexpr):
    """Packed values of `[T]` tokens, WIDTH bytes a token, as `unpack` gives them."""
    column = tl.arange(0, W * BITS // 8)
    mask = valid[:, None]
    if WIDTH < W * BITS // 8:
        mask = mask & (column < WIDTH)[None, :]
    return unpack(tl.load(pointer + tokens[:, None] * WIDTH + column[None, :], mask=mask, other=0), one, BITS, T, W)


@triton.jit
def load_small(
    pointer,
    tokens,
    valid,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    FIRST_BIT: tl.constexpr,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
):
    """GROUPS packed values a token, from bit FIRST_BIT of its WIDTH bytes on, as int32 `[T, G]`."""
    index = tl.arange(0, G)
    bit = FIRST_BIT + index * BITS
    mask = valid[:, None] & (index < GROUPS)[None, :]
    byte = tl.load(pointer + tokens[:, None] * WIDTH + (bit // 8)[None, :], mask=mask, other=0).to(tl.int32)
    return (byte >> (bit % 8)[None, :]) & ((1 << BITS) - 1)


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
    ALIGNED: tl.constexpr,
):
    """Addresses (at token `first`) and constants of one head's keys or values in one span: what its tiles share.

    Returns (codes, scales, ids, book, top, low, step): four addresses, the scales' factor, and the codebook's grid.
    """
    groups: tl.constexpr = (D + GROUP - 1) // GROUP
    code_width: tl.constexpr = (D * BITS + 7) // 8
    scale_bits: tl.constexpr = 4 if MIDRISE and BITS == 2 else 8
    scale_width: tl.constexpr = (groups * scale_bits + 7) // 8
    book_width: tl.constexpr = (D + 1) // 2 if MIDRISE else 2 * D
    item = head * tl.load(row + TOKENS) + first
    codes = byte_pointer(row, SIDE_ + CODES, item * code_width, ALIGNED, 4 if code_width % 4 == 0 else 1)
    scales = byte_pointer(row, SIDE_ + SCALES, item * scale_width, ALIGNED, 1)
    ids = codes
    book = codes
    low = tl.zeros((W,), tl.float32)
    step = low
    if MIDRISE:
        top = tl.load(tl.load(row + SIDE_ + TOP).to(tl.pointer_type(tl.bfloat16)) + head).to(tl.float32)
    else:
        top = tl.load(tl.load(row + SIDE_ + TOP).to(tl.pointer_type(tl.float16)) + head).to(tl.float32)
    if BOOK:
        ids = byte_pointer(row, SIDE_ + IDS, item, ALIGNED, 1)
        offset = head * tl.load(row + SIDE_ + COUNT) * book_width
        book = byte_pointer(row, SIDE_ + CENTROIDS, offset, ALIGNED, 16 if book_width % 16 == 0 else 1)
        if MIDRISE:
            grid = tl.load(row + SIDE_ + GRID).to(tl.pointer_type(tl.bfloat16)) + head * (2 * D)
            column = tl.arange(0, W)
            # Codes come as 1 + code / 16. Both are bf16, so that the difference is exact in float32.
            step = tl.load(grid + D + column, mask=column < D, other=0.0).to(tl.float32) * 16
            low = tl.load(grid + column, mask=column < D, other=0.0).to(tl.float32) - step
    return codes, scales, ids, book, top, low, step


@triton.jit
def load_side(
    side,
    zeros,
    tokens,
    valid,
    one,
    D: tl.constexpr,
    W: tl.constexpr,
    T: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    MIDRISE: tl.constexpr,
    BOOK: tl.constexpr,
    ZEROS_WIDTH: tl.constexpr,
    ZEROS_BIT: tl.constexpr,
):
    """Centroid plus dequantized residual of `[T]` tokens, counted from where `side` was opened: float32 `[T, W]`."""
    codes, scales, ids, book, top, low, step = side
    groups: tl.constexpr = (D + GROUP - 1) // GROUP
    G: tl.constexpr = W // GROUP if W > GROUP else 1
    code_width: tl.constexpr = (D * BITS + 7) // 8
    # 1 + code / levels, so that every difference below is exact and a scale times it rounds as in the eager twin.
    levels: tl.constexpr = 1 << BITS
    code = load_codes(codes, tokens, valid, one, code_width, BITS, T, W)
    if MIDRISE:
        scale_bits: tl.constexpr = 4 if BITS == 2 else 8
        scale_width: tl.constexpr = (groups * scale_bits + 7) // 8
        scale_code = load_small(scales, tokens, valid, scale_width, scale_bits, 0, groups, G)
        scale = log_scale(scale_code, scale_bits, 2 if BITS == 2 else 16) * top
        value = spread(scale * levels, T, G, W) * (code - (1 + (levels - 1) / 2 / levels))
    else:
        scale = load_small(scales, tokens, valid, groups, 8, 0, groups, G).to(tl.float32) * top
        zero = load_small(zeros, tokens, valid, ZEROS_WIDTH, BITS, ZEROS_BIT, groups, G).to(tl.float32)
        value = spread(scale * levels, T, G, W) * (code - spread(1 + zero / levels, T, G, W))
    if BOOK:
        chosen = tl.load(ids + tokens, mask=valid, other=0).to(tl.int32)
        if MIDRISE:
            book_width: tl.constexpr = (D + 1) // 2
            centroid = low[None, :] + step[None, :] * load_codes(book, chosen, valid, one, book_width, 4, T, W)
        else:
            column = tl.arange(0, W)
            mask = valid[:, None] & (column < D)[None, :]
            rows = book.to(tl.pointer_type(tl.bfloat16))
            centroid = tl.load(rows + chosen[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
        value = centroid + value
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
    ALIGNED: tl.constexpr,
):
    """What the tiles of one head from token `first` on share for C U^T; without a correction the basis is zero.

    Returns (coefficients, scales, factor, bitmap, basis bf16 `[R, W]`).
    """
    column = tl.arange(0, W)
    rank = tl.arange(0, R)
    tokens = tl.load(row + TOKENS)
    present = tl.load(row + PSAC_U) != 0
    basis = tl.load(row + PSAC_U).to(tl.pointer_type(tl.bfloat16)) + head * (D * RANK)
    inside = present & (rank < RANK)[:, None] & (column < D)[None, :]
    basis = tl.load(basis + column[None, :] * RANK + rank[:, None], mask=inside, other=0.0)
    bitmap = tl.load(row + BITMAP).to(tl.pointer_type(tl.uint8)) + head * ((tokens + 7) // 8) + first // 8
    items = head * tokens + first
    width: tl.constexpr = (RANK + 1) // 2 if MIDRISE else RANK
    if SPARSE:
        sparse = tl.load(row + BITMAP) != 0
        items = tl.where(sparse, head * tl.load(row + ROW_COUNT), items)
        field = tl.where(sparse, ROWS, PSAC_C)
        coefficients = tl.load(row + field).to(tl.pointer_type(tl.uint8)) + items * width
    else:
        coefficients = byte_pointer(row, PSAC_C, items * width, ALIGNED, 8 if width % 8 == 0 else 1)
    factor = 1.0
    scales = tl.load(row + PSAC_C_SCALES).to(tl.pointer_type(tl.uint8))
    if MIDRISE:
        scales += items
        factor = tl.load(tl.load(row + PSAC_C_FACTOR).to(tl.pointer_type(tl.bfloat16)) + head, mask=present, other=0.0)
        factor = factor.to(tl.float32)
    else:
        scales += items * 2
    return coefficients, scales, factor, bitmap, basis


@triton.jit
def load_rows(
    correction,
    present,
    row_index,
    kept,
    one,
    RANK: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    MIDRISE: tl.constexpr,
):
    """Coefficients of stored rows `row_index` `[T]`: whole numbers as floats `[T, R]`, and the unit `[T]` they count.

    Tokens that are not `kept` get a unit of zero.
    """
    coefficients, scales, factor, _, _ = correction
    kept = kept & present
    if MIDRISE:
        codes = (load_codes(coefficients, row_index, kept, one, (RANK + 1) // 2, 4, T, R) - 1.5) * 16
        scale_code = tl.load(scales + row_index, mask=kept, other=255).to(tl.int32)
        unit = log_scale(scale_code, 8, ROW_SCALE_PER_OCTAVE) * factor
    else:
        rank = tl.arange(0, R)
        signed = coefficients.to(tl.pointer_type(tl.int8))
        inside = kept[:, None] & (rank < RANK)[None, :]
        codes = tl.load(signed + row_index[:, None] * RANK + rank[None, :], mask=inside, other=0).to(tl.float32)
        unit = tl.load(scales.to(tl.pointer_type(tl.float16)) + row_index, mask=kept, other=0.0).to(tl.float32)
    return codes, unit


@triton.jit
def load_correction(
    correction,
    present,
    row_index,
    kept,
    one,
    RANK: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    MIDRISE: tl.constexpr,
):
    """C U^T, float32 `[T, W]`.

    The whole-number coefficients and the bf16 basis are exact operands of a matrix product; the unit comes after it.
    """
    codes, unit = load_rows(correction, present, row_index, kept, one, RANK, R, T, MIDRISE)
    return unit[:, None] * tl.dot(codes.to(OPERAND), correction[4].to(OPERAND), out_dtype=tl.float32)

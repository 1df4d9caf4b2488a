"""decode_layer in one launch: keys and values of all pieces of a layer, straight into the attention layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.runtime.errors import TritonError

from ..quantwm_core.backends import Between, OneOf, register
from ..quantwm_core.codec.bits import packed_width
from ..quantwm_core.span import PackedSpan, RawBlock
from .decode_pairs import TILE, decode_pairs_chunk
from .decode_rivals import launch_rival
from .launching import in_rows, launch
from .pairs import LIFTED, LIFTED_16
from .rows import copy_chunk, copy_stored_chunk, own_head, store_tile, turn
from .sizes import LENGTHS, ceil_div, next_power
from .tables import CHUNK, FIELDS, PieceTable, layer_tables
from .tiles import (
    BITMAP,
    KEYS,
    RAW,
    ROWS_BEFORE,
    START,
    TOKENS,
    VALUES,
    correct,
    fetch_ids,
    fetch_rows,
    fetch_side,
    finish_side,
    open_correction,
    open_side,
)

# What the kernels have been written and tested for; every kernel that reads spans shares it.
READABLE = {
    "device": OneOf(("cuda",)),
    "capability": Between((8, 0)),
    "dtype": OneOf((torch.bfloat16, torch.float16, torch.float32)),
    "method": OneOf(("quantwm", "quantwm-paper", "rtn", "kivi", "qvg", "qvg-pro")),
    "head_dim": Between(16, 256),
}
# A larger Hadamard matrix does not fit a program's shared memory.
ROTATED_BACK = READABLE | {"method": OneOf(("quarot",)), "head_dim": Between(16, 128)}
# Bit pattern of 1.0; see tiles.lane.
FLOAT_ONE = 0x3F800000
FAILURES = (TritonError, RuntimeError)
# Four times as many programs as a large GPU holds at once.
PROGRAMS = 4 * 16 * 132


@triton.jit
def decode_keys_chunk(
    row, first, count, head, target, target_stride, one,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr,
    R: tl.constexpr, MIDRISE: tl.constexpr, BOOK: tl.constexpr, SPARSE: tl.constexpr, ZEROS_WIDTH: tl.constexpr,
    CHUNK_: tl.constexpr, ALIGNED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Keys of `count` tokens from `first` on, correction included.

    While a tile is worked on, the next one is read, and the centroid ids of the one after it.
    """
    local = tl.arange(0, T)
    side = open_side(row, KEYS, head, first, D, W, BITS, GROUP, MIDRISE, BOOK, ZEROS_WIDTH)
    ids = fetch_ids(side, local, local < count, BOOK)
    code, scale, zero, centroid = fetch_side(
        side, local, local < count, ids, D, W, BITS, GROUP, MIDRISE, BOOK, ZEROS_WIDTH, 0, ALIGNED
    )
    ids = fetch_ids(side, local + T, local + T < count, BOOK)
    if RANK:
        correction = open_correction(row, head, first, D, W, RANK, R, MIDRISE, SPARSE)
        rows, unit = fetch_rows(correction, local, local < count, RANK, R, MIDRISE, ALIGNED)
    if SPARSE:
        sparse = tl.load(row + BITMAP) != 0
        before = rows_before(row, head, first // CHUNK_, CHUNK_)
    for offset in range(0, count, T):
        local = offset + tl.arange(0, T)
        valid = local < count
        ahead = local + T
        more = ahead < count
        next_code, next_scale, next_zero, next_centroid = fetch_side(
            side, ahead, more, ids, D, W, BITS, GROUP, MIDRISE, BOOK, ZEROS_WIDTH, 0, ALIGNED
        )
        ids = fetch_ids(side, ahead + T, ahead + T < count, BOOK)
        if RANK and not SPARSE:
            # Before the arithmetic: the loop's end waits for what was read in it.
            next_rows, next_unit = fetch_rows(correction, ahead, more, RANK, R, MIDRISE, ALIGNED)
        value = finish_side(side, code, scale, zero, centroid, one, W, T, BITS, GROUP, MIDRISE, BOOK, 0)
        if ROTATED:
            value = turn(row, first, local, valid, value, D, W, T)
        if RANK:
            if SPARSE:
                # Where a row lies depends on how many tokens before it have one, so these are not read ahead.
                kept = kept_rows(correction[3], local, valid, sparse)
                place = tl.where(sparse, before + tl.cumsum(kept, 0) - kept, local)
                rows, unit = fetch_rows(correction, place, kept != 0, RANK, R, MIDRISE, ALIGNED)
                before += tl.sum(kept, 0)
                value += correct(correction, rows, unit, one, T, R, MIDRISE)
            else:
                value += correct(correction, rows, unit, one, T, R, MIDRISE)
                rows, unit = next_rows, next_unit
        store_tile(target, target_stride, local, valid, value, D, W)
        code, scale, zero, centroid = next_code, next_scale, next_zero, next_centroid


@triton.jit
def rows_before(row, head, chunk, CHUNK_: tl.constexpr):
    """How many sparse rows precede a chunk."""
    chunks = (tl.load(row + TOKENS) + CHUNK_ - 1) // CHUNK_
    counts = tl.load(row + ROWS_BEFORE).to(tl.pointer_type(tl.int32))
    return tl.load(counts + head * chunks + chunk, mask=tl.load(row + BITMAP) != 0, other=0)


@triton.jit
def kept_rows(bitmap, local, valid, sparse):
    """1 for tokens that have a row, int32 `[T]`; all have one where rows are dense."""
    byte = tl.load(bitmap + local // 8, mask=valid & sparse, other=255).to(tl.int32)
    return ((byte >> (local % 8)) & 1) & valid.to(tl.int32)


@triton.jit
def decode_values_chunk(
    row, first, count, head, target, target_stride, one,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    MIDRISE: tl.constexpr, BOOK: tl.constexpr, ZEROS_WIDTH: tl.constexpr, ZEROS_BIT: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Values of `count` tokens from `first` on, reading ahead as for keys."""
    local = tl.arange(0, T)
    side = open_side(row, VALUES, head, first, D, W, BITS, GROUP, MIDRISE, BOOK, ZEROS_WIDTH)
    ids = fetch_ids(side, local, local < count, BOOK)
    code, scale, zero, centroid = fetch_side(
        side, local, local < count, ids, D, W, BITS, GROUP, MIDRISE, BOOK, ZEROS_WIDTH, ZEROS_BIT, ALIGNED
    )
    ids = fetch_ids(side, local + T, local + T < count, BOOK)
    for offset in range(0, count, T):
        local = offset + tl.arange(0, T)
        ahead = local + T
        next_code, next_scale, next_zero, next_centroid = fetch_side(
            side, ahead, ahead < count, ids, D, W, BITS, GROUP, MIDRISE, BOOK, ZEROS_WIDTH, ZEROS_BIT, ALIGNED
        )
        ids = fetch_ids(side, ahead + T, ahead + T < count, BOOK)
        value = finish_side(side, code, scale, zero, centroid, one, W, T, BITS, GROUP, MIDRISE, BOOK, ZEROS_BIT)
        store_tile(target, target_stride, local, local < count, value, D, W)
        code, scale, zero, centroid = next_code, next_scale, next_zero, next_centroid


@triton.jit(do_not_specialize=[*LENGTHS, "entries", "heads", "one", "lifted", "of_piece", "part"])
def decode_kernel(
    rows, tiles, tile_count, live_k, live_v, live_tokens, live_start, kb, ks, kh, vb, vs, vh,
    keys, values, out_b, out_s, out_h, entries, heads, origin, one, lifted, of_piece, part,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    GROUP: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, MIDRISE: tl.constexpr, BOOK: tl.constexpr,
    SPARSE: tl.constexpr, ZEROS_WIDTH: tl.constexpr, VALUE_ZEROS_BIT: tl.constexpr, CHUNK_: tl.constexpr,
    FIELD_COUNT: tl.constexpr, ALIGNED: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program: a chunk of one head's keys or `part` tokens of its values, stored ones or those of the live block.

    `origin` is the token that comes first in the output, `of_piece` see `tables.PieceTable`.
    """
    batch, h, side = own_head(entries)
    is_key = side == 0
    begin = tl.where(is_key, 0, (side - 1) * part)
    most = tl.where(is_key, CHUNK_, part)
    tile = tl.program_id(1)
    head = batch * heads + h
    out = batch * out_b + h * out_h
    if tile >= tile_count:
        first = (tile - tile_count).to(tl.int64) * CHUNK_ + begin
        count = tl.minimum(live_tokens - first, most).to(tl.int32)
        out += (live_start + first - origin) * out_s
        if is_key:
            copy_chunk(live_k + batch * kb + first * ks + h * kh, ks, keys + out, out_s, count, D, W, T)
        else:
            copy_chunk(live_v + batch * vb + first * vs + h * vh, vs, values + out, out_s, count, D, W, T)
        return
    if of_piece > 0:
        # Nothing to look up, which the program would wait for before all else.
        index = tile // of_piece
        first = ((tile - index * of_piece) * CHUNK_).to(tl.int64)
    else:
        index = tl.load(tiles + 2 * tile)
        first = tl.load(tiles + 2 * tile + 1).to(tl.int64)
    row = rows + index * FIELD_COUNT
    first += begin
    count = tl.minimum(tl.load(row + TOKENS) - first, most).to(tl.int32)
    out += (tl.load(row + START) + first - origin) * out_s
    if is_key:
        if KEY_BITS == 16 or tl.load(row + KEYS + RAW) != 0:
            copy_stored_chunk(row, KEYS, batch, h, first, count, keys + out, out_s, D, W, T, ROTATED)
        elif PAIRS:
            decode_pairs_chunk(
                row, KEYS, first, count, head, keys + out, out_s, lifted, one, D, W, T, KEY_BITS, GROUP, RANK, R,
                ROTATED,
            )  # fmt: skip
        else:
            decode_keys_chunk(
                row, first, count, head, keys + out, out_s, one, D, W, T, KEY_BITS, GROUP, RANK, R, MIDRISE, BOOK,
                SPARSE, ZEROS_WIDTH, CHUNK_, ALIGNED, ROTATED,
            )  # fmt: skip
    else:
        if VALUE_BITS == 16 or tl.load(row + VALUES + RAW) != 0:
            copy_stored_chunk(row, VALUES, batch, h, first, count, values + out, out_s, D, W, T, False)
        elif PAIRS:
            decode_pairs_chunk(
                row, VALUES, first, count, head, values + out, out_s, lifted, one, D, W, T, VALUE_BITS, GROUP, 0, R,
                False,
            )  # fmt: skip
        else:
            decode_values_chunk(
                row, first, count, head, values + out, out_s, one, D, W, T, VALUE_BITS, GROUP, MIDRISE, BOOK,
                ZEROS_WIDTH, VALUE_ZEROS_BIT, ALIGNED,
            )  # fmt: skip


def tile_width(head_dim: int) -> int:
    """Channels of a tile: a power of two that a matrix product can take."""
    return max(16, next_power(head_dim))


@lru_cache
def format_constants(numbers: tuple[int, ...], head_dim: int, aligned: bool) -> dict:
    """Compile-time constants for a format (see `tables.Format.numbers`, but the last); not to be changed."""
    key_bits, value_bits, group_size, rank, sparse, midrise, book, rotated = numbers
    groups = -(-head_dim // group_size)
    if key_bits == value_bits:
        # Zero-points of both sides stand next to each other without a gap.
        zeros_width, value_zeros_bit = packed_width(2 * groups, key_bits), groups * key_bits
    else:
        widths = [0 if bits == 16 else packed_width(groups, bits) for bits in (key_bits, value_bits)]
        zeros_width, value_zeros_bit = sum(widths), 8 * widths[0]
    return {
        "D": head_dim,
        "W": tile_width(head_dim),
        "KEY_BITS": key_bits,
        "VALUE_BITS": value_bits,
        "GROUP": group_size,
        "RANK": rank,
        # Triton 3.6 mixes up the terms of a product over 16 ranks when they come from INT4 in bytes.
        "R": max(32 if midrise and (rank % 4 or not aligned) else 16, next_power(rank)),
        "MIDRISE": bool(midrise),
        "BOOK": bool(book),
        "SPARSE": bool(sparse),
        "ZEROS_WIDTH": 0 if midrise else zeros_width,
        "VALUE_ZEROS_BIT": value_zeros_bit,
        "ALIGNED": aligned,
        "CHUNK_": CHUNK,
        "FIELD_COUNT": len(FIELDS),
        "ROTATED": bool(rotated),
    }


def in_pairs(constants: dict, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether two channels can be decoded at a time: codes come eight in a word, pairs are written as words.

    More than 4 bits are too many for sums in bfloat16.
    """
    c = constants
    return (
        c["MIDRISE"]
        and c["D"] >= 32
        and c["D"] % 8 == 0
        and {c["KEY_BITS"], c["VALUE_BITS"]} <= {2, 4, 16}
        and all(t.dtype in (torch.bfloat16, torch.float16) and t.data_ptr() % 4 == 0 for t in (keys, values))
        and all(stride % 2 == 0 for stride in keys.stride()[:3])
    )


def launch_shape(width: int, pairs: bool) -> dict:
    """Tokens of a tile, and warps: a thread has 16 values, so that it reads its codes and centroid as words."""
    if pairs:
        return {"T": TILE, "num_warps": 1, "maxnreg": 128 if width <= 128 else 255}
    return {"T": max(16, 2048 // width), "num_warps": 4 if width <= 128 else 8, "maxnreg": 96}


def value_parts(chunks: int) -> int:
    """Into how many parts to cut so many chunks of values: short work at the end, when not all can be busy any more."""
    return 1 << min(2, max(1, PROGRAMS // max(1, chunks)).bit_length() - 1)


@register("decode_layer", "triton", READABLE, failures=FAILURES)
def decode_layer(method, pieces: Sequence[RawBlock | PackedSpan], keys: torch.Tensor, values: torch.Tensor) -> None:
    """Kernel twin of `quantwm_core.operations.decode_layer`: one launch for all pieces of a format."""
    last = pieces[-1]
    # The live block is new at every call; its address is an argument, so that the table stays as it is.
    is_live = isinstance(last, RawBlock) and last.rotation is None
    live = last if is_live else RawBlock(*keys.new_empty(2, keys.shape[0], 0, *keys.shape[2:]))
    *earlier, table = layer_tables(pieces[: len(pieces) - is_live], keys.device)
    start = 0
    for one in earlier:
        launch_decode(one, nothing_of(live), keys[:, start:], values[:, start:])
        start += one.tokens
    rest = (keys[:, start:], values[:, start:]) if start else (keys, values)
    launch_decode(table, live, *rest)


@register("decode_layer", "triton", ROTATED_BACK, failures=FAILURES)
def decode_rotated_back(
    method, pieces: Sequence[RawBlock | PackedSpan], keys: torch.Tensor, values: torch.Tensor
) -> None:
    """`decode_layer` for a method that needs a product with a whole matrix."""
    decode_layer(method, pieces, keys, values)


def nothing_of(live: RawBlock) -> RawBlock:
    """No tokens, in the shape of `live`: where only stored pieces are to be decoded."""
    return RawBlock(live.k[:, :0], live.v[:, :0])


def launch_decode(
    table: PieceTable, live: RawBlock, keys: torch.Tensor, values: torch.Tensor, chunks: slice | None = None
) -> None:
    """Decode a table's pieces, or only some of its chunks, then copy the live block; `keys` starts at the first.

    Raises:
        ValueError: when `keys` and `values` do not lie in memory alike, channels side by side.
    """
    if keys.stride() != values.stride() or keys.stride(-1) != 1:
        raise ValueError(
            f"keys and values are decoded into tensors of the same strides, the last one 1; got {keys.stride()} and "
            f"{values.stride()}. Cut both from one tensor [2, B, S, H, D]."
        )
    tiles = table.tiles if chunks is None else table.tiles[chunks]
    origin = 0 if chunks is None else table.first_token(chunks.start)
    of_piece = table.of_piece if chunks is None else 0
    numbers = [table.tokens, origin, of_piece, table.aligned, table.pairs, *table.format.numbers()]
    run = decode_spans if torch.compiler.is_compiling() else _launch
    run(table.rows, tiles, in_rows(live.k), in_rows(live.v), keys, values, numbers)


@torch.library.custom_op(
    "quantwm::decode_spans",
    mutates_args=("keys", "values"),
    schema="(Tensor rows, Tensor tiles, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, int[] numbers) -> ()",
)
def decode_spans(rows, tiles, k, v, keys, values, numbers):
    """The launch as an operator that torch.compile does not look into; the tables hold addresses."""
    _launch(rows, tiles, k, v, keys, values, numbers)


@decode_spans.register_fake
def _(rows, tiles, k, v, keys, values, numbers):
    return None


def _launch(rows, tiles, k, v, keys, values, numbers):
    tokens, origin, of_piece, aligned, pairs, *form, family = numbers
    batch, _, heads, head_dim = keys.shape
    constants = format_constants(tuple(form), head_dim, bool(aligned))
    chunks = len(tiles) + ceil_div(k.shape[1], CHUNK)
    arguments = (
        rows, tiles, len(tiles), k, v, k.shape[1], tokens, *k.stride()[:3], *v.stride()[:3],
        keys, values, *keys.stride()[:3], batch, heads, origin, FLOAT_ONE,
    )  # fmt: skip
    if family:
        launch_rival(constants, family, (heads, chunks, 2 * batch), arguments)
        return
    pairs = bool(pairs) and in_pairs(constants, keys, values)
    if pairs:
        constants = format_constants(tuple(form), head_dim, True)
    parts = value_parts(batch * heads * chunks) if pairs else 1
    lifted = LIFTED_16 if keys.dtype == torch.float16 else LIFTED
    arguments = (*arguments, lifted.value, of_piece, CHUNK // parts)
    shape = launch_shape(constants["W"], pairs)
    launch(decode_kernel, (heads, chunks, (1 + parts) * batch), arguments, **constants, PAIRS=pairs, **shape)

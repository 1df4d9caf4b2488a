"""decode_layer for the methods that are here to be compared with: kivi, qvg, qvg-pro and quarot.

The same grid, tables and layout as `decode`; a chunk is decoded a tile after the other, without reading ahead.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..quantwm_core.codec.hadamard import hadamard_rotation
from .launching import launch
from .rows import copy_chunk, copy_stored_chunk, own_head, store_tile, turn
from .sizes import LENGTHS
from .tiles import (
    CENTROIDS,
    CODES,
    COUNT,
    IDS,
    KEYS,
    LOW,
    OPERAND,
    PHASE,
    RAW,
    SCALES,
    STAGES,
    START,
    TOKENS,
    VALUES,
    byte_pointer,
    fetch_ids,
    fetch_packed,
    fetch_side,
    fetch_small,
    finish_side,
    open_side,
    spread,
    unpack,
)

# Numbers of `tables.FAMILIES`.
KIVI = tl.constexpr(1)
QVG = tl.constexpr(2)
QUAROT = tl.constexpr(3)


@triton.jit
def decode_kivi_keys(
    row, first, count, head, target, target_stride, one,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ALIGNED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Keys whose steps and lowest values belong to GROUP tokens and one channel; the first group may be cut short."""
    tokens = tl.load(row + TOKENS)
    phase = tl.load(row + PHASE)
    column = tl.arange(0, W)
    codes = byte_pointer(row, KEYS + CODES, (head * tokens + first) * ((D * BITS + 7) // 8))
    table = head * ((phase + tokens + GROUP - 1) // GROUP) * D
    steps = tl.load(row + KEYS + SCALES).to(tl.pointer_type(tl.float16)) + table
    lows = tl.load(row + KEYS + LOW).to(tl.pointer_type(tl.float16)) + table
    for offset in range(0, count, T):
        local = offset + tl.arange(0, T)
        valid = local < count
        group = (phase + first + local) // GROUP
        inside = valid[:, None] & (column < D)[None, :]
        place = group[:, None] * D + column[None, :]
        step = tl.load(steps + place, mask=inside, other=0.0).to(tl.float32)
        low = tl.load(lows + place, mask=inside, other=0.0).to(tl.float32)
        packed = fetch_packed(codes, local, valid, (D * BITS + 7) // 8, BITS, W, 4, ALIGNED)
        value = low + step * ((unpack(packed, one, BITS, T, W) - 1) * (1 << BITS))
        if ROTATED:
            value = turn(row, first, local, valid, value, D, W, T)
        store_tile(target, target_stride, local, valid, value, D, W)


@triton.jit
def decode_kivi_values(
    row, first, count, head, target, target_stride, one,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Values whose steps and lowest values belong to a token and GROUP channels."""
    groups: tl.constexpr = (D + GROUP - 1) // GROUP
    G: tl.constexpr = W // GROUP if W > GROUP else 1
    item = head * tl.load(row + TOKENS) + first
    index = tl.arange(0, G)
    codes = byte_pointer(row, VALUES + CODES, item * ((D * BITS + 7) // 8))
    steps = tl.load(row + VALUES + SCALES).to(tl.pointer_type(tl.float16)) + item * groups
    lows = tl.load(row + VALUES + LOW).to(tl.pointer_type(tl.float16)) + item * groups
    for offset in range(0, count, T):
        local = offset + tl.arange(0, T)
        valid = local < count
        inside = valid[:, None] & (index < groups)[None, :]
        place = local[:, None] * groups + index[None, :]
        step = tl.load(steps + place, mask=inside, other=0.0).to(tl.float32)
        low = tl.load(lows + place, mask=inside, other=0.0).to(tl.float32)
        packed = fetch_packed(codes, local, valid, (D * BITS + 7) // 8, BITS, W, 4, ALIGNED)
        code = (unpack(packed, one, BITS, T, W) - 1) * (1 << BITS)
        value = spread(low, T, G, W) + spread(step, T, G, W) * code
        store_tile(target, target_stride, local, valid, value, D, W)


@triton.jit
def fp8(byte):
    """Scales, which are never negative, from FP8 E4M3: older GPUs have no instruction for it."""
    x = byte.to(tl.int32)
    normal = ((x << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(x < 8, x.to(tl.float32) * 0.001953125, normal)


@triton.jit
def decode_qvg_chunk(
    row, SIDE_: tl.constexpr, first, count, head, target, target_stride, one,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ALIGNED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Keys or values: a residual around zero with an FP8 step a group, and a centroid of every stage."""
    groups: tl.constexpr = (D + GROUP - 1) // GROUP
    G: tl.constexpr = W // GROUP if W > GROUP else 1
    levels: tl.constexpr = 1 << BITS
    column = tl.arange(0, W)
    item = head * tl.load(row + TOKENS) + first
    stages = tl.load(row + SIDE_ + STAGES).to(tl.int32)
    centroids = tl.load(row + SIDE_ + COUNT)
    codes = byte_pointer(row, SIDE_ + CODES, item * ((D * BITS + 7) // 8))
    scales = byte_pointer(row, SIDE_ + SCALES, item * groups)
    ids = byte_pointer(row, SIDE_ + IDS, item * stages)
    books = tl.load(row + SIDE_ + CENTROIDS).to(tl.pointer_type(tl.bfloat16)) + head * stages * centroids * D
    for offset in range(0, count, T):
        local = offset + tl.arange(0, T)
        valid = local < count
        inside = valid[:, None] & (column < D)[None, :]
        step = fp8(fetch_small(scales, local, valid, groups, 8, 0, groups, G))
        packed = fetch_packed(codes, local, valid, (D * BITS + 7) // 8, BITS, W, 4, ALIGNED)
        unit = unpack(packed, one, BITS, T, W) - (1 + (levels / 2 - 1) / levels)
        value = spread(step * levels, T, G, W) * unit
        for stage in range(stages):
            centroid = tl.load(ids + local * stages + stage, mask=valid, other=0).to(tl.int64)
            place = (stage * centroids + centroid)[:, None] * D + column[None, :]
            value += tl.load(books + place, mask=inside, other=0.0).to(tl.float32)
        if ROTATED:
            value = turn(row, first, local, valid, value, D, W, T)
        store_tile(target, target_stride, local, valid, value, D, W)


@triton.jit
def decode_quarot_chunk(
    row, SIDE_: tl.constexpr, first, count, head, target, target_stride, one, signs, lengths,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ZEROS_WIDTH: tl.constexpr, ZEROS_BIT: tl.constexpr, ALIGNED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Keys or values as `rtn` stores them, turned back by the Hadamard matrix, `signs` `[D, D]` over `lengths` `[D]`.

    Signs are exact in few bits, so that three products with parts of a float32 are as good as one.
    """
    channel = tl.arange(0, W)
    inside = (channel < D)[:, None] & (channel < D)[None, :]
    # Transposed: rows were multiplied by the matrix when they were stored.
    back = tl.load(signs + channel[None, :] * D + channel[:, None], mask=inside, other=0.0).to(OPERAND)
    length = tl.load(lengths + channel, mask=channel < D, other=1.0)
    side = open_side(row, SIDE_, head, first, D, W, BITS, GROUP, False, False, ZEROS_WIDTH)
    for offset in range(0, count, T):
        local = offset + tl.arange(0, T)
        valid = local < count
        ids = fetch_ids(side, local, valid, False)
        parts = fetch_side(side, local, valid, ids, D, W, BITS, GROUP, False, False, ZEROS_WIDTH, ZEROS_BIT, ALIGNED)
        stored = finish_side(side, *parts, one, W, T, BITS, GROUP, False, False, ZEROS_BIT)
        high = stored.to(OPERAND)
        rest = stored - high.to(tl.float32)
        middle = rest.to(OPERAND)
        low = (rest - middle.to(tl.float32)).to(OPERAND)
        value = tl.dot(high, back, tl.dot(middle, back, tl.dot(low, back, out_dtype=tl.float32))) / length[None, :]
        if ROTATED:
            value = turn(row, first, local, valid, value, D, W, T)
        store_tile(target, target_stride, local, valid, value, D, W)


@triton.jit(do_not_specialize=[*LENGTHS, "entries", "heads", "one"])
def rival_kernel(
    rows, tiles, tile_count, live_k, live_v, live_tokens, live_start, kb, ks, kh, vb, vs, vh,
    keys, values, out_b, out_s, out_h, entries, heads, origin, one, signs, lengths,
    FAMILY: tl.constexpr, D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS_WIDTH: tl.constexpr, VALUE_ZEROS_BIT: tl.constexpr,
    CHUNK_: tl.constexpr, FIELD_COUNT: tl.constexpr, ALIGNED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """One program: up to CHUNK tokens of one head's keys or values; see `decode.decode_kernel`."""
    batch, h, side = own_head(entries)
    is_key = side == 0
    tile = tl.program_id(1)
    head = batch * heads + h
    out = batch * out_b + h * out_h
    if tile >= tile_count:
        first = (tile - tile_count).to(tl.int64) * CHUNK_
        count = tl.minimum(live_tokens - first, CHUNK_).to(tl.int32)
        out += (live_start + first - origin) * out_s
        if is_key:
            copy_chunk(live_k + batch * kb + first * ks + h * kh, ks, keys + out, out_s, count, D, W, T)
        else:
            copy_chunk(live_v + batch * vb + first * vs + h * vh, vs, values + out, out_s, count, D, W, T)
        return
    row = rows + tl.load(tiles + 2 * tile) * FIELD_COUNT
    first = tl.load(tiles + 2 * tile + 1).to(tl.int64)
    count = tl.minimum(tl.load(row + TOKENS) - first, CHUNK_).to(tl.int32)
    out += (tl.load(row + START) + first - origin) * out_s
    if is_key:
        if KEY_BITS == 16 or tl.load(row + KEYS + RAW) != 0:
            copy_stored_chunk(row, KEYS, batch, h, first, count, keys + out, out_s, D, W, T, ROTATED)
        elif FAMILY == KIVI:
            decode_kivi_keys(
                row, first, count, head, keys + out, out_s, one, D, W, T, KEY_BITS, GROUP, ALIGNED, ROTATED
            )
        elif FAMILY == QVG:
            decode_qvg_chunk(
                row, KEYS, first, count, head, keys + out, out_s, one, D, W, T, KEY_BITS, GROUP, ALIGNED, ROTATED
            )
        else:
            decode_quarot_chunk(
                row, KEYS, first, count, head, keys + out, out_s, one, signs, lengths, D, W, T, KEY_BITS, GROUP,
                ZEROS_WIDTH, 0, ALIGNED, ROTATED,
            )  # fmt: skip
    else:
        if VALUE_BITS == 16 or tl.load(row + VALUES + RAW) != 0:
            copy_stored_chunk(row, VALUES, batch, h, first, count, values + out, out_s, D, W, T, False)
        elif FAMILY == KIVI:
            decode_kivi_values(row, first, count, head, values + out, out_s, one, D, W, T, VALUE_BITS, GROUP, ALIGNED)
        elif FAMILY == QVG:
            decode_qvg_chunk(
                row, VALUES, first, count, head, values + out, out_s, one, D, W, T, VALUE_BITS, GROUP, ALIGNED, False
            )
        else:
            decode_quarot_chunk(
                row, VALUES, first, count, head, values + out, out_s, one, signs, lengths, D, W, T, VALUE_BITS, GROUP,
                ZEROS_WIDTH, VALUE_ZEROS_BIT, ALIGNED, False,
            )  # fmt: skip


@lru_cache(maxsize=8)
def _matrix(width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Signs bf16 `[width, width]` and lengths float `[width]` of the matrix that the method's eager twin rotates by."""
    rotation = hadamard_rotation(width)
    return rotation.sign().bfloat16().to(device), (1 / rotation.diagonal().abs()).to(device)


def launch_shape(width: int) -> dict:
    """Tokens of a tile, at least what a matrix product takes, and warps."""
    return {"T": max(16, 2048 // width), "num_warps": 4 if width <= 128 else 8}


def launch_rival(constants: dict, family: int, grid: tuple, arguments: tuple) -> None:
    """Decode a table of a family's pieces; `constants` and `arguments` are those of `decode.decode_kernel`."""
    names = ("D", "W", "KEY_BITS", "VALUE_BITS", "GROUP", "ZEROS_WIDTH", "VALUE_ZEROS_BIT")
    names += ("CHUNK_", "FIELD_COUNT", "ALIGNED", "ROTATED")
    own = {name: constants[name] for name in names} | {"FAMILY": family}
    keys = arguments[13]
    matrix = _matrix(own["D"], keys.device) if family == QUAROT.value else (keys, keys)
    launch(rival_kernel, grid, (*arguments, *matrix), **own, **launch_shape(own["W"]))

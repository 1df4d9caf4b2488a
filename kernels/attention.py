"""Attention straight on packed keys and values: no decoded copy of the cache exists, not even of one layer.

Every block of queries decodes the tiles again, in registers, so this is the way when queries are few, or when there is
no memory for a decoded layer. `reading` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..quantwm_core import jensen
from ..quantwm_core.codec.groups import group_count
from ..quantwm_core.methods import Method
from ..quantwm_core.span import PackedSpan, RawBlock
from .decode import FLOAT_ONE, format_constants
from .launching import in_rows
from .rows import turn
from .sizes import LENGTHS, ceil_div
from .tables import PieceTable
from .tiles import (
    KEYS,
    RAW,
    RAW_B,
    RAW_H,
    RAW_S,
    TOKENS,
    VALUES,
    fetch_ids,
    fetch_rows,
    fetch_side,
    finish_rows,
    finish_side,
    log_scale,
    open_correction,
    open_side,
    small,
)

LOG2_E = math.log2(math.e)
LOG2_E_ = tl.constexpr(LOG2_E)
# The setting's values, by the kernel's number for each.
JENSEN_FORMS = ("off", "second-order", "exact")
# Of steps of 2-bit keys.
LEVELS = tl.constexpr(16)


@triton.jit
def softmax_step(scores, valid, v, peak, total, acc):
    """Online softmax over one more tile: `scores` `[M, N]` in powers of two, values `[N, W]`."""
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    p = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None])
    return new_peak, total * decay + tl.sum(p, 1), acc


@triton.jit
def attend_raw(
    q, row, first, k, k_stride, v, v_stride, count, scale, peak, total, acc,
    D: tl.constexpr, W: tl.constexpr, N: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """`count` tokens in full precision, from token `first` of a piece on."""
    column = tl.arange(0, W)
    for offset in range(0, count, N):
        token = offset + tl.arange(0, N)
        valid = token < count
        mask = valid[:, None] & (column < D)[None, :]
        k_tile = tl.load(k + token[:, None] * k_stride + column[None, :], mask=mask, other=0.0)
        if ROTATED:
            k_tile = turn(row, first, token, valid, k_tile.to(tl.float32), D, W, N).to(k_tile.dtype)
        v_tile = tl.load(v + token[:, None] * v_stride + column[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k_tile), out_dtype=tl.float32)
        peak, total, acc = softmax_step(scores * scale, valid, v_tile, peak, total, acc)
    return peak, total, acc


@triton.jit
def attend_packed_chunk(
    q, row, first, count, head, scale, one, costs, peak, total, acc,
    D: tl.constexpr, W: tl.constexpr, N: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    GROUP: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, ALIGNED: tl.constexpr, ROTATED: tl.constexpr,
    JENSEN: tl.constexpr,
):  # fmt: skip
    """`count` tokens of a packed span. The correction enters the scores as (Q U) C^T.

    `costs` are pointers to each query's row of this span's table of exact costs (JENSEN 2).
    """
    keys = open_side(row, KEYS, head, first, D, W, KEY_BITS, GROUP, True, True, 0)
    values = open_side(row, VALUES, head, first, D, W, VALUE_BITS, GROUP, True, True, 0)
    if RANK:
        correction = open_correction(row, head, first, D, W, RANK, R, True, False)
        along = tl.dot(q, tl.trans(correction[5].to(q.dtype)), out_dtype=tl.float32)
        projected = along.to(q.dtype)
    if JENSEN == 1:
        # Noise along the directions of the correction has been corrected away.
        noisy = q.to(tl.float32)
        if RANK:
            noisy -= tl.dot(along, correction[5].to(tl.float32), input_precision="tf32x3")
        norms = group_norms(noisy, W, GROUP) * (LOG2_E_ / (24 * D))
    for offset in range(0, count, N):
        token = offset + tl.arange(0, N)
        valid = token < count
        ids = fetch_ids(keys, token, valid, True)
        parts = fetch_side(keys, token, valid, ids, D, W, KEY_BITS, GROUP, True, True, 0, 0, ALIGNED)
        k = finish_side(keys, *parts, one, W, N, KEY_BITS, GROUP, True, True, 0)
        if ROTATED:
            k = turn(row, first, token, valid, k, D, W, N)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), out_dtype=tl.float32)
        if RANK:
            rows, unit = fetch_rows(correction, token, valid, RANK, R, True, ALIGNED)
            short, unit = finish_rows(correction, rows, unit, one, N, R, True)
            scores = tl.dot(projected, tl.trans((short * unit[:, None]).to(q.dtype)), scores)
        scores *= scale
        if JENSEN:
            codes = small(parts[1], 4 if KEY_BITS == 2 else 8, 0, W // GROUP if W > GROUP else 1)
        if JENSEN == 1:
            scores -= second_order_bias(norms, codes, keys[5], W, KEY_BITS, GROUP)
        if JENSEN == 2:
            scores -= exact_bias(costs, codes, D, W, GROUP) * LOG2_E_
        ids = fetch_ids(values, token, valid, True)
        parts = fetch_side(values, token, valid, ids, D, W, VALUE_BITS, GROUP, True, True, 0, 0, ALIGNED)
        v = finish_side(values, *parts, one, W, N, VALUE_BITS, GROUP, True, True, 0)
        peak, total, acc = softmax_step(scores, valid, v.to(q.dtype), peak, total, acc)
    return peak, total, acc


@triton.jit
def group_norms(q, W: tl.constexpr, GROUP: tl.constexpr):
    """Squared length of each channel group of `[M, W]`: `[M, groups]`."""
    groups: tl.constexpr = W // GROUP if W > GROUP else 1
    return tl.sum(tl.reshape(q * q, (q.shape[0], groups, W // groups)), axis=2)


@triton.jit
def one_group(per_group, group: tl.constexpr):
    """Column `group` of `[N, groups]`."""
    return tl.sum(tl.where((tl.arange(0, per_group.shape[1]) == group)[None, :], per_group, 0), axis=1)


@triton.jit
def second_order_bias(norms, codes, top, W: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Sum over groups of norm times squared step, `[M, N]`, from `norms` `[M, groups]` and codes `[N, groups]`."""
    steps = log_scale(codes, 4 if BITS == 2 else 8, 2 if BITS == 2 else 16) * top
    bias = one_group(norms, 0)[:, None] * one_group(steps * steps, 0)[None, :]
    for group in tl.static_range(1, W // GROUP):
        bias += one_group(norms, group)[:, None] * one_group(steps * steps, group)[None, :]
    return bias


@triton.jit
def exact_bias(costs, codes, D: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr):
    """Sum over groups of what each key's step costs each query, `[M, N]`; a row of costs is `[levels, groups]`."""
    groups: tl.constexpr = (D + GROUP - 1) // GROUP
    bias = tl.load(costs[:, None] + (one_group(codes, 0) * groups)[None, :])
    for group in tl.static_range(1, groups):
        bias += tl.load(costs[:, None] + (one_group(codes, group) * groups + group)[None, :])
    return bias


@triton.jit(do_not_specialize=LENGTHS)
def attention_kernel(
    rows, tiles, tile_count, queries, qb, qs, qh, live_k, live_v, live_tokens, kb, ks, kh, vb, vs, vh,
    out, ob, os, oh, heads, query_count, scale, one, costs,
    D: tl.constexpr, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, CHUNK_: tl.constexpr,
    FIELD_COUNT: tl.constexpr, ALIGNED: tl.constexpr, ROTATED: tl.constexpr, JENSEN: tl.constexpr,
):  # fmt: skip
    """One program: M queries of one head over all stored pieces and the live block.

    JENSEN: 1 corrects logits of rounded keys to second order, 2 by a table `[pieces, B * H, queries, levels, groups]`.
    """
    h = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    head = batch * heads + h
    query = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.arange(0, W)
    mask = (query < query_count)[:, None] & (column < D)[None, :]
    place = queries + batch * qb + h * qh
    q = tl.load(place + query[:, None] * qs + column[None, :], mask=mask, other=0.0)
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, W), tl.float32)
    for tile in range(tile_count):
        row = rows + tl.load(tiles + 2 * tile) * FIELD_COUNT
        first = tl.load(tiles + 2 * tile + 1).to(tl.int64)
        count = tl.minimum(tl.load(row + TOKENS) - first, CHUNK_).to(tl.int32)
        raw = tl.load(row + KEYS + RAW)
        if raw != 0:
            k_stride = tl.load(row + KEYS + RAW_S).to(tl.int32)
            v_stride = tl.load(row + VALUES + RAW_S).to(tl.int32)
            k = raw.to(tl.pointer_type(queries.dtype.element_ty)) + first * k_stride
            k += batch * tl.load(row + KEYS + RAW_B) + h * tl.load(row + KEYS + RAW_H)
            v = tl.load(row + VALUES + RAW).to(tl.pointer_type(queries.dtype.element_ty)) + first * v_stride
            v += batch * tl.load(row + VALUES + RAW_B) + h * tl.load(row + VALUES + RAW_H)
            peak, total, acc = attend_raw(
                q, row, first, k, k_stride, v, v_stride, count, scale, peak, total, acc, D, W, N, ROTATED
            )
        else:
            own_costs = query
            if JENSEN == 2:
                piece = tl.load(tiles + 2 * tile).to(tl.int64)
                own_head = piece * tl.num_programs(2) * heads + head
                item = own_head * query_count + tl.minimum(query, query_count - 1)
                own_costs = costs + item * (LEVELS * ((D + GROUP - 1) // GROUP))
            peak, total, acc = attend_packed_chunk(
                q, row, first, count, head, scale, one, own_costs, peak, total, acc,
                D, W, N, KEY_BITS, VALUE_BITS, GROUP, RANK, R, ALIGNED, ROTATED, JENSEN,
            )  # fmt: skip
    k = live_k + batch * kb + h * kh
    v = live_v + batch * vb + h * vh
    peak, total, acc = attend_raw(q, rows, 0, k, ks, v, vs, live_tokens, scale, peak, total, acc, D, W, N, False)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + batch * ob + h * oh + query[:, None] * os + column[None, :], result, mask=mask)


def launch_shape(width: int, queries: int) -> dict:
    """Queries and keys of a tile, and warps.

    At most 32 queries: from 64 on Triton 3.6 takes Hopper's warp-group products, and with them this kernel gave wrong
    results on an H200 (benchmarks/NOTES.md); with the older ones it was right at every width.
    """
    return {
        "M": 32 if queries > 16 else 16,
        "N": 64 if width <= 128 else 32,
        "num_warps": 4,
        "num_stages": 1,
    }


def attend_spans(
    table: PieceTable,
    live: RawBlock,
    queries: torch.Tensor,
    correction: str = "off",
    costs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `queries` `[B, T, H, D]` over a table's pieces and the live block; same shape and type.

    Packed pieces must be of method `quantwm`.

    Args:
        correction: the setting `jensen`; corrects the logits of rounded keys.
        costs: what `exact_costs` gives, for the exact form.
    """
    queries, k, v = in_rows(queries), in_rows(live.k), in_rows(live.v)
    launch = attend_tables if torch.compiler.is_compiling() else _launch
    numbers = [JENSEN_FORMS.index(correction), table.aligned, *table.format.numbers()]
    return launch(table.rows, table.tiles, queries, k, v, costs, numbers)


def exact_costs(pieces: Sequence[RawBlock | PackedSpan], queries: torch.Tensor, method: Method) -> torch.Tensor:
    """What each level of a span's 2-bit steps costs each query, float32 `[pieces, B * H, T, levels, groups]`.

    Sixteen levels serve all keys of a span, so the logarithms are taken here, once, and the kernel looks them up.
    """
    flat = queries.transpose(1, 2).flatten(0, 1).float()
    groups = group_count(queries.shape[-1], method.settings.group_size)
    costs = flat.new_empty(len(pieces), *flat.shape[:2], LEVELS.value, groups)
    for piece, own in zip(pieces, costs):
        if isinstance(piece, PackedSpan):
            (steps,) = method.key_steps(piece)
            own.copy_(jensen.exact_costs(steps.project(flat), steps))
    return costs


@torch.library.custom_op(
    "quantwm::attend_spans",
    mutates_args=(),
    schema="(Tensor rows, Tensor tiles, Tensor queries, Tensor k, Tensor v, Tensor? costs, int[] numbers) -> Tensor",
)
def attend_tables(rows, tiles, queries, k, v, costs, numbers):
    """The launch as an operator that torch.compile does not look into; the tables hold addresses."""
    return _launch(rows, tiles, queries, k, v, costs, numbers)


@attend_tables.register_fake
def _(rows, tiles, queries, k, v, costs, numbers):
    return torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)


def _launch(rows, tiles, queries, k, v, costs, numbers):
    jensen_form, aligned, *form, _ = numbers
    batch, count, heads, head_dim = queries.shape
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    constants = dict(format_constants(tuple(form), head_dim, bool(aligned)))
    # Scales enter the product with the coefficients, and Triton 3.6 then mixes up products over 16 ranks.
    constants["R"] = max(32, constants["R"])
    wanted = ("D", "W", "KEY_BITS", "VALUE_BITS", "GROUP", "RANK", "R", "ALIGNED", "CHUNK_", "FIELD_COUNT", "ROTATED")
    shape = launch_shape(constants["W"], count)
    attention_kernel[ceil_div(count, shape["M"]), heads, batch](
        rows, tiles, len(tiles), queries, *queries.stride()[:3], k, v, k.shape[1], *k.stride()[:3], *v.stride()[:3],
        out, *out.stride()[:3], heads, count, head_dim**-0.5 * LOG2_E, FLOAT_ONE,
        queries if costs is None else costs, JENSEN=jensen_form, **{name: constants[name] for name in wanted}, **shape,
    )  # fmt: skip
    return out

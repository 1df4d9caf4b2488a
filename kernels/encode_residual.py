"""Codes of what the centroids leave, with error feedback, and the coefficients of the correction."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..quantwm_core.codec.bits import packed_width
from ..quantwm_core.codec.codebook import Codebook
from ..quantwm_core.codec.midrise import decode_log_scales, scale_format
from ..quantwm_core.codec.psac import ROW_SCALE_BITS, ROW_SCALE_PER_OCTAVE
from .encode_match import Match
from .encode_tiles import (
    OPERAND,
    SLICE,
    head_pointer,
    largest_of_tiles,
    load_centroids,
    load_grid,
    log_code,
    round_bf16,
    round_even,
    to_operand,
)

TILE = 64


@triton.jit
def _store_scales(
    wanted, scales, top, n, token, valid, tokens,
    GROUPS: tl.constexpr, GP: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, PER_OCTAVE: tl.constexpr,
):  # fmt: skip
    """Pack the scale codes of a tile: one byte each, or two in a byte."""
    group = tl.arange(0, GP)
    mask = valid[:, None] & (group < GROUPS)[None, :]
    wish = tl.load(wanted + (n * tokens + token)[:, None] * GROUPS + group[None, :], mask=mask, other=0.0)
    codes = tl.where((group < GROUPS)[None, :], log_code(top, wish, BITS, PER_OCTAVE), 0)
    if BITS == 8:
        tl.store(scales + (n * tokens + token)[:, None] * GROUPS + group[None, :], codes.to(tl.uint8), mask=mask)
    else:
        width: tl.constexpr = (GROUPS + 1) // 2
        byte = tl.arange(0, GP // 2)
        pairs = tl.reshape(codes, (T, GP // 2, 2)) << (4 * tl.arange(0, 2))[None, None, :]
        pointer = scales + (n * tokens + token)[:, None] * width + byte[None, :]
        tl.store(pointer, tl.sum(pairs, axis=2).to(tl.uint8), mask=valid[:, None] & (byte < width)[None, :])


@triton.jit
def _residual_kernel(
    x, book, grid, ids, wanted, peaks, factors, feedback, basis,
    codes_out, scales_out, top_out, raw_out, raw_peaks_out,
    tokens, heads, count, feedback_heads, stride_b, stride_s, stride_h,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, GP: tl.constexpr,
    SCALE_BITS: tl.constexpr, PER_OCTAVE: tl.constexpr,
    FEEDBACK: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """One tile of tokens of one head, 16 channels at a time: each block knows what the blocks before it got wrong."""
    n = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * T + tl.arange(0, T)
    valid = token < tokens
    row = n * tokens + token
    source = head_pointer(x, n, heads, stride_b, stride_h) + token.to(tl.int64)[:, None] * stride_s
    own_ids = tl.load(ids + row, mask=valid, other=0).to(tl.int32)
    top = round_bf16(largest_of_tiles(peaks, n, tl.num_programs(1)))
    if tile == 0:
        tl.store(top_out + n, top)
    _store_scales(wanted, scales_out, top, n, token, valid, tokens, GROUPS, GP, T, SCALE_BITS, PER_OCTAVE)

    levels: tl.constexpr = 1 << BITS
    words: tl.constexpr = BITS // 2
    inner = tl.arange(0, SLICE)
    channel = tl.arange(0, W)
    direction = tl.arange(0, RP)
    owed = tl.zeros((T, W), tl.float32)
    raw = tl.zeros((T, RP), tl.float32)
    step = tl.zeros((T,), tl.float32)
    for block in tl.static_range(D // SLICE):
        first: tl.constexpr = block * SLICE
        if first % GROUP == 0:
            wish = tl.load(wanted + row * GROUPS + first // GROUP, mask=valid, other=0.0)
            step = top * tl.load(factors + log_code(top, wish, SCALE_BITS, PER_OCTAVE))
        low, unit = load_grid(grid, n, first, D, SLICE)
        centroids = load_centroids(book, low, unit, n, count, own_ids, valid, first, D, SLICE)
        values = tl.load(source + first + inner[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        residual = values - centroids
        target = residual
        if FEEDBACK:
            mine = (tl.arange(0, W // SLICE) == block)[None, :, None]
            target -= tl.sum(tl.where(mine, tl.reshape(owed, (T, W // SLICE, SLICE)), 0.0), axis=1)
        divisor = tl.where(step > 0, step, 1.0)[:, None] + tl.zeros_like(target)
        scaled = tl.where((step > 0)[:, None], tl.div_rn(target, divisor), 0.0)
        codes = tl.minimum(tl.maximum(tl.floor(scaled + levels / 2), 0.0), levels - 1)
        error = to_operand(step[:, None] * (codes - (levels - 1) / 2) - residual)
        lanes = tl.reshape(codes.to(tl.int32), (T, words, 32 // BITS))
        packed = lanes << (BITS * tl.arange(0, 32 // BITS))[None, None, :]
        word = tl.arange(0, words)
        pointer = codes_out + row[:, None] * (D * BITS // 32) + block * words + word[None, :]
        tl.store(pointer, tl.sum(packed, axis=2), mask=valid[:, None])
        if FEEDBACK and first + SLICE < D:
            weight = feedback + (n % feedback_heads) * D * D + channel[None, :] * D + first + inner[:, None]
            weights = tl.load(weight, mask=(channel < D)[None, :], other=0.0).to(OPERAND)
            owed = tl.dot(error, weights, owed, input_precision="ieee")
        if RANK:
            u = basis + n * D * RANK + (inner + first)[:, None] * RANK + direction[None, :]
            directions = tl.load(u, mask=(direction < RANK)[None, :], other=0.0).to(OPERAND)
            raw = tl.dot(error, directions, raw, input_precision="ieee")
    if RANK:
        mask = valid[:, None] & (direction < RANK)[None, :]
        # The coefficients project what decoding misses, which is minus the error of the codes.
        tl.store(raw_out + row[:, None] * RANK + direction[None, :], -raw, mask=mask)
        size = tl.max(tl.where(mask, tl.abs(raw), 0.0), axis=1)
        tl.store(raw_peaks_out + n * tl.num_programs(1) + tile, tl.max(size, axis=0))


@triton.jit
def _coefficient_kernel(
    raw, peaks, factors, codes_out, scales_out, factor_out, tokens, tiles,
    RANK: tl.constexpr, RP: tl.constexpr, T: tl.constexpr, SCALE_BITS: tl.constexpr, PER_OCTAVE: tl.constexpr,
):  # fmt: skip
    """INT4 rows with a logarithmic scale per token, from coefficients float32 `[N, S, RANK]`."""
    n = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * T + tl.arange(0, T)
    valid = token < tokens
    row = n * tokens + token
    top = round_bf16(tl.div_rn(largest_of_tiles(peaks, n, tiles), 7.0))
    if tile == 0:
        tl.store(factor_out + n, top)
    direction = tl.arange(0, RP)
    mask = valid[:, None] & (direction < RANK)[None, :]
    values = tl.load(raw + row[:, None] * RANK + direction[None, :], mask=mask, other=0.0)
    largest = tl.max(tl.abs(values), axis=1)
    scale = log_code(top, tl.div_rn(largest, tl.full((T,), 7.0, tl.float32)), SCALE_BITS, PER_OCTAVE)
    unit = top * tl.load(factors + scale)
    divisor = tl.where(unit > 0, unit, 1.0)[:, None] + tl.zeros_like(values)
    steps = tl.where((unit > 0)[:, None], tl.div_rn(values, divisor), 0.0)
    codes = (tl.minimum(tl.maximum(round_even(steps), -8.0), 7.0) + 8.0).to(tl.int32)
    codes = tl.where((direction < RANK)[None, :], codes, 0)
    pairs = tl.reshape(codes, (T, RP // 2, 2)) << (4 * tl.arange(0, 2))[None, None, :]
    width: tl.constexpr = (RANK + 1) // 2
    byte = tl.arange(0, RP // 2)
    pointer = codes_out + row[:, None] * width + byte[None, :]
    tl.store(pointer, tl.sum(pairs, axis=2).to(tl.uint8), mask=valid[:, None] & (byte < width)[None, :])
    tl.store(scales_out + row, scale.to(tl.uint8), mask=valid)


@lru_cache
def _factors(bits: int, per_octave: int, device: torch.device) -> torch.Tensor:
    """Factor of every scale code, from the eager twin, so that both round alike: float `[2**bits]`."""
    codes = torch.arange(1 << bits, device=device)
    return decode_log_scales(codes.view(1, -1, 1), torch.ones(1, device=device), bits, per_octave).flatten()


def encode_residual(
    prefix: str,
    x: torch.Tensor,
    book: Codebook,
    match: Match,
    bits: int,
    group_size: int,
    feedback: torch.Tensor | None = None,
    basis: torch.Tensor | None = None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, torch.Tensor | None]:
    """Stored tensors `[N, S, ...]` of `x` `[B, S, H, D]`; with a basis bf16 `[N, D, R]` also float coefficients.

    feedback: bf16 `[N, D, D]` or `[H, D, D]`, or None for plain rounding.

    Returns:
        tensors by name, coefficients `[N, S, R]` and the largest of each tile, for `encode_coefficients`.
    """
    batch, tokens, heads, width = x.shape
    n, count = batch * heads, book.codes.shape[1]
    groups, tiles = match.wanted.shape[-1], match.peaks.shape[-1]
    scale_bits, per_octave = scale_format(bits)
    rank = 0 if basis is None else basis.shape[-1]
    new = x.new_empty
    codes = new(n, tokens, packed_width(width, bits), dtype=torch.uint8)
    scales = new(n, tokens, packed_width(groups, scale_bits), dtype=torch.uint8)
    top = new(n, dtype=torch.bfloat16)
    raw = new(n, tokens, rank, dtype=torch.float32)
    raw_peaks = new(n, tiles, dtype=torch.float32)
    unused = match.peaks
    _residual_kernel[(n, tiles)](
        x, book.codes, book.grid, match.ids, match.wanted, match.peaks,
        _factors(scale_bits, per_octave, x.device),
        unused if feedback is None else feedback.contiguous(), unused if basis is None else basis.contiguous(),
        codes.view(torch.int32), scales, top, raw, raw_peaks,
        tokens, heads, count, 1 if feedback is None else feedback.shape[0], *x.stride()[:3],
        D=width, W=triton.next_power_of_2(width), T=TILE, BITS=bits,
        GROUP=group_size, GROUPS=groups, GP=max(2, triton.next_power_of_2(groups)),
        SCALE_BITS=scale_bits, PER_OCTAVE=per_octave,
        FEEDBACK=feedback is not None, RANK=rank, RP=max(16, triton.next_power_of_2(rank)),
        # A product fused into a sum would round once where the eager twin rounds twice.
        enable_fp_fusion=False,
    )  # fmt: skip
    tensors = {
        f"{prefix}_codes": codes,
        f"{prefix}_ids": match.ids,
        f"{prefix}_scales": scales,
        f"{prefix}_scales_top": top,
    }
    return tensors, raw if rank else None, raw_peaks if rank else None


def encode_coefficients(raw: torch.Tensor, peaks: torch.Tensor) -> dict[str, torch.Tensor]:
    """Stored tensors of coefficients float `[N, S, R]`: the twin of `psac.encode_coefficients_int4`."""
    n, tokens, rank = raw.shape
    packed = raw.new_empty(n, tokens, packed_width(rank, 4), dtype=torch.uint8)
    scales = raw.new_empty(n, tokens, dtype=torch.uint8)
    factor = raw.new_empty(n, dtype=torch.bfloat16)
    _coefficient_kernel[(n, triton.cdiv(tokens, TILE))](
        raw, peaks, _factors(ROW_SCALE_BITS, ROW_SCALE_PER_OCTAVE, raw.device), packed, scales, factor,
        tokens, peaks.shape[-1],
        RANK=rank, RP=max(2, triton.next_power_of_2(rank)), T=TILE,
        SCALE_BITS=ROW_SCALE_BITS, PER_OCTAVE=ROW_SCALE_PER_OCTAVE, enable_fp_fusion=False,
    )  # fmt: skip
    return {"k_psac_c": packed, "k_psac_c_scales": scales, "k_psac_c_factor": factor}

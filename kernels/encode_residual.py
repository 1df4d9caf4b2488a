"""Codes of what the centroids leave, with error feedback, and the coefficients of the correction.

Channels are rounded 16 at a time, and what the later ones owe for the errors of the earlier ones is added up in
halves: the second half of any run is told all errors of the first half by one matrix product. Joined runs interleave
their channels, which costs nothing in registers; weights are loaded in that order.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..quantwm_core.codec.bits import packed_width
from ..quantwm_core.codec.codebook import Codebook
from ..quantwm_core.codec.midrise import decode_log_scales, scale_format
from ..quantwm_core.codec.psac import ROW_SCALE_BITS, ROW_SCALE_PER_OCTAVE
from ..quantwm_core.rotation import Rotation
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
from .launching import launch
from .sizes import ceil_div, next_power

TILE = 64
LAUNCH = {"num_warps": 4}


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
def _channel(place, SIZE: tl.constexpr):
    """Channel at `place` in a run of SIZE channels made by joining two runs of half the size, down to 16."""
    if SIZE == 16:
        return place
    if SIZE == 32:
        return (place & 1) * 16 + (place >> 1)
    if SIZE == 64:
        return (place & 1) * 32 + ((place >> 1) & 1) * 16 + (place >> 2)
    if SIZE == 128:
        return (place & 1) * 64 + ((place >> 1) & 1) * 32 + ((place >> 2) & 1) * 16 + (place >> 3)
    return (
        (place & 1) * 128 + ((place >> 1) & 1) * 64 + ((place >> 2) & 1) * 32 + ((place >> 3) & 1) * 16 + (place >> 4)
    )


@triton.jit
def _owe(errors, owed, feedback, FIRST: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr):
    """What a run of HALF channels owes, with the errors `[T, HALF]` of the run before it, which starts at FIRST."""
    place = tl.arange(0, HALF)
    source = FIRST + _channel(place, HALF)[:, None]
    target = FIRST + HALF + _channel(place, HALF)[None, :]
    weights = tl.load(feedback + target * D + source, mask=target < D, other=0.0).to(OPERAND)
    return tl.dot(errors, weights, owed, input_precision="ieee")


@triton.jit
def _group_step(
    tile, FIRST: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    SCALE_BITS: tl.constexpr, PER_OCTAVE: tl.constexpr,
):  # fmt: skip
    """Stored step of the group in which channel FIRST lies, and its reciprocal (0 for no step): float32 `[T]` each."""
    wanted, factors, top, row, valid = tile[0], tile[1], tile[2], tile[3], tile[4]
    group: tl.constexpr = FIRST // GROUP if FIRST // GROUP < GROUPS else 0
    wish = tl.load(wanted + row * GROUPS + group, mask=valid, other=0.0)
    step = top * tl.load(factors + log_code(top, wish, SCALE_BITS, PER_OCTAVE))
    positive = step > 0
    inverse = tl.div_rn(tl.where(positive, 1.0, 0.0), tl.where(positive, step, 1.0))
    return step, tl.minimum(inverse, 3.4028234663852886e38)


@triton.jit
def _errors_16(tile, owed, step, inverse, FIRST: tl.constexpr, D: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr):
    """Round 16 channels, less what they owe, store their codes, and return their errors."""
    row, valid, source, ids, book, grid, codes_out, n, count = tile[3:]
    middle: tl.constexpr = ((1 << BITS) - 1) / 2
    words: tl.constexpr = BITS // 2
    if FIRST >= D:
        return to_operand(tl.zeros((T, 16), tl.float32))
    low, unit = load_grid(grid, n, FIRST, D, SLICE)
    values = tl.load(source + FIRST + tl.arange(0, 16)[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    residual = values - load_centroids(book, low, unit, n, count, ids, valid, FIRST, D, SLICE)
    place = (residual - owed) * inverse[:, None] + middle
    # Added to 1.5 * 2**23 a float is rounded to a whole number, which then stands in its last bits.
    lifted = tl.minimum(tl.maximum(place, 0.0), 2 * middle) + 12582912.0
    lanes = tl.reshape(lifted.to(tl.int32, bitcast=True) & ((1 << BITS) - 1), (T, words, 32 // BITS))
    packed = tl.sum(lanes << (BITS * tl.arange(0, 32 // BITS))[None, None, :], axis=2)
    pointer = codes_out + row[:, None] * (D * BITS // 32) + FIRST // 16 * words + tl.arange(0, words)[None, :]
    tl.store(pointer, packed, mask=valid[:, None])
    return to_operand(step[:, None] * ((lifted - 12582912.0) - middle) - residual)


@triton.jit
def _errors(
    tile, owed, step, inverse, feedback, FIRST: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SCALE_BITS: tl.constexpr, PER_OCTAVE: tl.constexpr,
    FEEDBACK: tl.constexpr,
):  # fmt: skip
    """Round a run of SIZE channels and return their errors `[T, SIZE]`, in the order of `_channel`."""
    if SIZE == GROUP:
        step, inverse = _group_step(tile, FIRST, GROUP, GROUPS, SCALE_BITS, PER_OCTAVE)
    if SIZE == 16:
        return _errors_16(tile, owed, step, inverse, FIRST, D, T, BITS)
    else:
        half: tl.constexpr = SIZE // 2
        middle: tl.constexpr = FIRST + SIZE // 2
        left, right = tl.split(tl.reshape(owed, (T, half, 2)))
        before = _errors(
            tile, left, step, inverse, feedback, FIRST, half, D, T,
            BITS, GROUP, GROUPS, SCALE_BITS, PER_OCTAVE, FEEDBACK,
        )  # fmt: skip
        if FEEDBACK and middle < D:
            right = _owe(before, right, feedback, FIRST, half, D)
        after = _errors(
            tile, right, step, inverse, feedback, middle, half, D, T,
            BITS, GROUP, GROUPS, SCALE_BITS, PER_OCTAVE, FEEDBACK,
        )  # fmt: skip
        return tl.reshape(tl.join(before, after), (T, SIZE))


@triton.jit
def _directions(basis, channel, D: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr):
    """Rows `channel` of a basis `[D, RANK]`, as an operand."""
    direction = tl.arange(0, RP)
    mask = (channel < D)[:, None] & (direction < RANK)[None, :]
    return tl.load(basis + channel[:, None] * RANK + direction[None, :], mask=mask, other=0.0).to(OPERAND)


@triton.jit
def _turned_product(
    errors, basis, cos, sin, token, valid,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """RoPE of errors `[T, W]`, in the order of `_channel`, times the basis: `[T, RP]`.

    Channels of a pair lie W / 16 places apart, and never in different runs of 16.
    """
    apart: tl.constexpr = W // 16
    pairs = tl.permute(tl.reshape(errors.to(tl.float32), (T, 8, 2, apart)), (0, 1, 3, 2))
    a, b = tl.split(tl.reshape(pairs, (T, W // 2, 2)))
    half = tl.arange(0, W // 2)
    channel = _channel(half // apart * (2 * apart) + half % apart, W)
    offset = token[:, None] * (D // 2) + (channel // 2)[None, :]
    mask = valid[:, None] & (channel < D)[None, :]
    c = tl.load(cos + offset, mask=mask, other=1.0)
    s = tl.load(sin + offset, mask=mask, other=0.0)
    turned = tl.reshape(tl.join(a * c - b * s, a * s + b * c), (T, W))
    # A product over half of the narrowest head would be too short for the matrix units.
    place = tl.arange(0, W)
    channel = _channel(place // 2 // apart * (2 * apart) + place // 2 % apart, W) + place % 2
    return tl.dot(to_operand(turned), _directions(basis, channel, D, RANK, RP), input_precision="ieee")


@triton.jit
def _residual_kernel(
    x, book, grid, ids, wanted, peaks, factors, feedback, basis,
    cos, sin, codes_out, scales_out, top_out, raw_out, raw_peaks_out,
    tokens, tiles, heads, count, feedback_heads, stride_b, stride_s, stride_h,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, GP: tl.constexpr,
    SCALE_BITS: tl.constexpr, PER_OCTAVE: tl.constexpr,
    FEEDBACK: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """One tile of tokens of one head; see `_errors_16` for the order in which channels are rounded."""
    n = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    token = program * T + tl.arange(0, T)
    valid = token < tokens
    row = n * tokens + token
    source = head_pointer(x, n, heads, stride_b, stride_h) + token.to(tl.int64)[:, None] * stride_s
    own_ids = tl.load(ids + row, mask=valid, other=0).to(tl.int32)
    top = round_bf16(largest_of_tiles(peaks, n, tiles))
    if program == 0:
        tl.store(top_out + n, top)
    _store_scales(wanted, scales_out, top, n, token, valid, tokens, GROUPS, GP, T, SCALE_BITS, PER_OCTAVE)
    tile = (wanted, factors, top, row, valid, source, own_ids, book, grid, codes_out, n, count)
    owed = tl.zeros((T, W), tl.float32)
    feedback += (n % feedback_heads) * D * D
    # Replaced where a run is one group; a group wider than the head keeps this one.
    step, inverse = _group_step(tile, 0, GROUP, GROUPS, SCALE_BITS, PER_OCTAVE)
    errors = _errors(
        tile, owed, step, inverse, feedback, 0, W, D, T,
        BITS, GROUP, GROUPS, SCALE_BITS, PER_OCTAVE, FEEDBACK,
    )  # fmt: skip
    if RANK:
        direction = tl.arange(0, RP)
        if ROTATED:
            raw = _turned_product(errors, basis + n * D * RANK, cos, sin, token, valid, D, W, T, RANK, RP)
        else:
            channel = _channel(tl.arange(0, W), W)
            directions = _directions(basis + n * D * RANK, channel, D, RANK, RP)
            raw = tl.dot(errors, directions, input_precision="ieee")
    if RANK:
        mask = valid[:, None] & (direction < RANK)[None, :]
        # The coefficients project what decoding misses, which is minus the error of the codes.
        tl.store(raw_out + row[:, None] * RANK + direction[None, :], -raw, mask=mask)
        size = tl.max(tl.where(mask, tl.abs(raw), 0.0), axis=1)
        tl.store(raw_peaks_out + n * tl.num_programs(1) + program, tl.max(size, axis=0))


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
    rotation: Rotation | None = None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, torch.Tensor | None]:
    """Stored tensors `[N, S, ...]` of `x` `[B, S, H, D]`; with a basis bf16 `[N, D, R]` also float coefficients.

    feedback: bf16 `[N, D, D]` or `[H, D, D]`, or None for plain rounding.
    rotation: RoPE that `x` is stored before, and the basis is meant after.

    Returns:
        tensors by name, coefficients `[N, S, R]` and the largest of each tile, for `encode_coefficients`.
    """
    batch, tokens, heads, width = x.shape
    n, count = batch * heads, book.codes.shape[1]
    groups, tiles = match.wanted.shape[-1], ceil_div(tokens, TILE)
    scale_bits, per_octave = scale_format(bits)
    rank = 0 if basis is None else basis.shape[-1]
    new = x.new_empty
    codes = new(n, tokens, packed_width(width, bits), dtype=torch.uint8)
    scales = new(n, tokens, packed_width(groups, scale_bits), dtype=torch.uint8)
    top = new(n, dtype=torch.bfloat16)
    raw = new(n, tokens, rank, dtype=torch.float32)
    raw_peaks = new(n, tiles, dtype=torch.float32)
    unused = match.peaks
    arguments = (
        x, book.codes, book.grid, match.ids, match.wanted, match.peaks,
        _factors(scale_bits, per_octave, x.device),
        unused if feedback is None else feedback.contiguous(), unused if basis is None else basis.contiguous(),
        *((unused, unused) if rotation is None else (t.contiguous() for t in rotation.tensors)),
        codes.view(torch.int32), scales, top, raw, raw_peaks,
        tokens, match.peaks.shape[-1], heads, count, 1 if feedback is None else feedback.shape[0], *x.stride()[:3],
    )  # fmt: skip
    launch(
        _residual_kernel, (n, tiles), arguments,
        D=width, W=next_power(width), T=TILE, BITS=bits,
        GROUP=group_size, GROUPS=groups, GP=max(2, next_power(groups)),
        SCALE_BITS=scale_bits, PER_OCTAVE=per_octave,
        FEEDBACK=feedback is not None, RANK=rank, RP=max(16, next_power(rank)),
        ROTATED=rotation is not None,
        # A product fused into a sum would round once where the eager twin rounds twice.
        enable_fp_fusion=False, **LAUNCH,
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
    factors = _factors(ROW_SCALE_BITS, ROW_SCALE_PER_OCTAVE, raw.device)
    launch(
        _coefficient_kernel, (n, ceil_div(tokens, TILE)),
        (raw, peaks, factors, packed, scales, factor, tokens, peaks.shape[-1]),
        RANK=rank, RP=max(2, next_power(rank)), T=TILE,
        SCALE_BITS=ROW_SCALE_BITS, PER_OCTAVE=ROW_SCALE_PER_OCTAVE, enable_fp_fusion=False,
    )  # fmt: skip
    return {"k_psac_c": packed, "k_psac_c_scales": scales, "k_psac_c_factor": factor}

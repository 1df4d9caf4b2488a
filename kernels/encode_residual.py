"""Codes of what the centroids leave, with error feedback, and the coefficients of the correction.

Channels are rounded 16 at a time, and each 16 are told the errors of all before them by matrix products. A value
stays in the thread that loaded it until it is stored: channels are ordered as these products hold them (`_place`), and
loads give each thread what it will hold there.
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
    head_pointer,
    largest_of_tiles,
    log_code,
    round_bf16,
    round_even,
    to_operand,
)
from .launching import launch
from .sizes import LENGTHS, ceil_div, next_power
from .tiles import OPERAND

# Tokens of a program. Threads of one warp wait for each other at no cost; twelve such programs fit a multiprocessor.
TILE = 32
LAUNCH = {"num_warps": 1, "maxnreg": 168}
COEFFICIENT_TILE = 64


@triton.jit
def _place(index):
    """Channel at `index` of 16: a thread's two pairs of columns of a matrix product are four channels in a row."""
    return (index >> 1 & 3) * 4 + (index >> 3) * 2 + (index & 1)


@triton.jit
def _in_place(x, ROWS: tl.constexpr):
    """Columns `[ROWS, 16]` by channel in the order of `_place`."""
    return tl.reshape(tl.permute(tl.reshape(x, (ROWS, 4, 2, 2)), (0, 2, 1, 3)), (ROWS, 16))


@triton.jit
def _steps(
    wanted, factors, scales, top, row, valid,
    GROUPS: tl.constexpr, GP: tl.constexpr, T: tl.constexpr,
    SCALE_BITS: tl.constexpr, PER_OCTAVE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Stored steps of a tile and their reciprocals (0 for no step) over 2**BITS, float32 `[T, GP]`; stores codes."""
    group = tl.arange(0, GP)
    mask = valid[:, None] & (group < GROUPS)[None, :]
    wish = tl.load(wanted + row[:, None] * GROUPS + group[None, :], mask=mask, other=0.0)
    codes = log_code(top, wish, SCALE_BITS, PER_OCTAVE)
    step = top * tl.load(factors + codes)
    # One byte each, or two in a byte.
    if SCALE_BITS == 8:
        tl.store(scales + row[:, None] * GROUPS + group[None, :], codes.to(tl.uint8), mask=mask)
    else:
        width: tl.constexpr = (GROUPS + 1) // 2
        byte = tl.arange(0, GP // 2)
        real = tl.where((group < GROUPS)[None, :], codes, 0)
        pairs = tl.reshape(real, (T, GP // 2, 2)) << (4 * tl.arange(0, 2))[None, None, :]
        pointer = scales + row[:, None] * width + byte[None, :]
        tl.store(pointer, tl.sum(pairs, axis=2).to(tl.uint8), mask=valid[:, None] & (byte < width)[None, :])
    positive = step > 0
    inverse = tl.div_rn(tl.where(positive, 1.0, 0.0), tl.where(positive, step, 1.0))
    return step, tl.minimum(inverse, 3.4028234663852886e38) * (1.0 / (1 << BITS))


@triton.jit
def _column(x, index: tl.constexpr, WIDTH: tl.constexpr):
    """Column `index` of float `[T, WIDTH]`."""
    return tl.sum(tl.where((tl.arange(0, WIDTH) == index)[None, :], x, 0.0), axis=1)


@triton.jit
def _load(source, book, FIRST: tl.constexpr):
    """Values `[T, 16]` from channel FIRST on, and codes of their centroids, four nibbles an int16 `[T, 4]`."""
    values = source + FIRST + tl.arange(0, 16)[None, :]
    words = book + FIRST // 4 + tl.arange(0, 4)[None, :]
    return tl.load(tl.max_contiguous(values, (1, 4))), tl.load(tl.max_contiguous(words, (1, 1)))


@triton.jit
def _centroids(words, grid, FIRST: tl.constexpr, D: tl.constexpr, T: tl.constexpr):
    """Channels FIRST to FIRST + 15 of centroids, from the codes that `_load` gives, float32 `[T, 16]`."""
    # Four nibbles in the last bits of 2**23. They stay where they are, and the steps shrink instead.
    lifted = words.to(tl.uint16, bitcast=True).to(tl.int32) | 0x4B000000
    nibbles = tl.reshape(lifted[:, :, None] & ((15 << 4 * tl.arange(0, 4)) | 0x4B000000)[None, None, :], (T, 16))
    codes = nibbles.to(tl.float32, bitcast=True) - 8388608.0
    channel = tl.arange(0, 16)
    low = tl.load(grid + FIRST + channel).to(tl.float32)
    shrink = (1 << (12 - 4 * (channel & 3))).to(tl.float32) * (1.0 / 4096)
    step = tl.load(grid + D + FIRST + channel).to(tl.float32) * shrink
    return tl.fma(step[None, :], codes, low[None, :])


@triton.jit
def _round(
    values, words, owed, step, inverse, grid,
    FIRST: tl.constexpr, D: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Codes of 16 channels, less what they owe, as bytes `[T, 2 BITS]`, and their errors `[T, 16]` in place."""
    residual = _in_place(values.to(tl.float32) - _centroids(words, grid, FIRST, D, T), T)
    # A place on the grid divided by all codes, a power of two: below 0 and above 1 a sum is cut for nothing.
    place = tl.clamp((residual - owed) * inverse[:, None] + (0.5 - 0.5 / (1 << BITS)), 0.0, 1.0)
    # Added to 1.5 * 2**23 a float is rounded to a whole number, which then stands in its last bits.
    lifted = tl.minimum(tl.fma(place, 1 << BITS, 12582912.0), 12582911.0 + (1 << BITS))
    lanes = tl.permute(tl.reshape(lifted.to(tl.int32, bitcast=True), (T, 2, 4, 2)), (0, 2, 1, 3))
    lanes = tl.reshape(lanes, (T, 2 * BITS, 8 // BITS))
    packed = tl.sum(lanes << (BITS * tl.arange(0, 8 // BITS))[None, None, :], axis=2).to(tl.uint8)
    # The step times a level, -1.5 to 1.5 for 2 bits, rounded once.
    level = lifted - (12582912.0 + (1 << BITS) / 2)
    return packed, to_operand(tl.fma(step[:, None], level, 0.5 * step[:, None]) - residual)


@triton.jit
def _store_codes(packed, codes, row, valid, FIRST: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Store what `_round` packed."""
    pointer = codes + row[:, None] * (D * BITS // 8) + FIRST * BITS // 8 + tl.arange(0, 2 * BITS)[None, :]
    tl.store(tl.max_contiguous(pointer, (1, 1)), packed, mask=valid[:, None])


@triton.jit
def _owe(errors, owed, feedback, SOURCE: tl.constexpr, TARGET: tl.constexpr, D: tl.constexpr):
    """What 16 channels from TARGET on owe, with the errors of those from SOURCE on."""
    target = TARGET + _place(tl.arange(0, 16))[:, None]
    weights = feedback + target * D + SOURCE + tl.arange(0, 16)[None, :]
    weights = _in_place(tl.load(tl.max_contiguous(weights, (1, 4))), 16).to(OPERAND)
    return tl.dot(errors, tl.trans(weights), owed, input_precision="ieee")


@triton.jit
def _pairs_in_place(x, T: tl.constexpr):
    """Columns `[T, 8]` by pair of channels in the order of `_place`, as `[T, 8, 1, 1]`."""
    return tl.reshape(tl.permute(tl.reshape(x, (T, 4, 2)), (0, 2, 1)), (T, 8, 1, 1))


@triton.jit
def _turned(errors, cos, sin, token, FIRST: tl.constexpr, D: tl.constexpr, T: tl.constexpr):
    """RoPE of the errors of 16 channels, in place; `token` counts from where the angles begin."""
    pair = FIRST // 2 + tl.arange(0, 8)
    offset = token[:, None] * (D // 2) + pair[None, :]
    c = _pairs_in_place(tl.load(tl.max_contiguous(cos + offset, (1, 2))), T)
    s = _pairs_in_place(tl.load(tl.max_contiguous(sin + offset, (1, 2))), T)
    # A sum over the two of a pair, see the ids of `_residual_kernel`.
    source = tl.arange(0, 2)[None, None, :, None]
    target = tl.arange(0, 2)[None, None, None, :]
    turn = tl.where(source == target, c, tl.where(source < target, s, -s))
    return to_operand(tl.reshape(tl.sum(tl.reshape(errors.to(tl.float32), (T, 8, 2, 1)) * turn, axis=2), (T, 16)))


@triton.jit(do_not_specialize=LENGTHS)
def _residual_kernel(
    x, book, grid, ids, wanted, peaks, factors, feedback, basis,
    cos, sin, codes_out, scales_out, top_out, raw_out, raw_peaks_out,
    tokens, tiles, heads, count, feedback_heads, stride_b, stride_s, stride_h,
    D: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, GP: tl.constexpr,
    SCALE_BITS: tl.constexpr, PER_OCTAVE: tl.constexpr,
    FEEDBACK: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """One tile of tokens of one head, 16 channels after the other."""
    n = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    token = program * T + tl.arange(0, T)
    valid = token < tokens
    # What lies past the end is the last token again, and is not stored.
    token = tl.minimum(token, tokens - 1)
    row = n * tokens + token
    source = head_pointer(x, n, heads, stride_b, stride_h) + token.to(tl.int64)[:, None] * stride_s
    # A sum of single values: Triton 3.6 chooses how threads hold operands by the narrowest load behind them, gets
    # products wrong that are too short for bytes, and does not look behind a sum.
    own_ids = tl.sum(tl.load(ids + row).to(tl.int32)[:, None], axis=1)
    book = book + n * count * (D // 4) + own_ids[:, None] * (D // 4)
    values, words = _load(source, book, 0)
    top = round_bf16(largest_of_tiles(peaks, n, tiles, 256))
    if program == 0:
        tl.store(top_out + n, top)
    steps, inverses = _steps(
        wanted, factors, scales_out, top, row, valid, GROUPS, GP, T, SCALE_BITS, PER_OCTAVE, BITS
    )  # fmt: skip
    grid += n * 2 * D
    if ROTATED:
        cos += program.to(tl.int64) * (T * (D // 2))
        sin += program.to(tl.int64) * (T * (D // 2))
    feedback += (n % feedback_heads) * D * D
    basis += n * D * RANK
    step, inverse = _column(steps, 0, GP), _column(inverses, 0, GP)
    direction = tl.arange(0, RP)[None, :]
    raw = tl.zeros((T, RP), tl.float32)
    errors, packed = (), None
    for block in tl.static_range(D // 16):
        if block * 16 % GROUP == 0:
            step, inverse = _column(steps, block * 16 // GROUP, GP), _column(inverses, block * 16 // GROUP, GP)
        owed = tl.zeros((T, 16), tl.float32)
        if FEEDBACK:
            for before in tl.static_range(block):
                owed = _owe(errors[before], owed, feedback, before * 16, block * 16, D)
        # A load cannot pass a store: it is asked for a block early, and codes are stored a block late.
        next_values, next_words = values, words
        if block * 16 + 16 < D:
            next_values, next_words = _load(source, book, block * 16 + 16)
        if block:
            _store_codes(packed, codes_out, row, valid, block * 16 - 16, D, BITS)
        packed, own = _round(values, words, owed, step, inverse, grid, block * 16, D, T, BITS)
        values, words = next_values, next_words
        errors = errors + (own,)
        if RANK:
            channel = block * 16 + _place(tl.arange(0, 16))[:, None]
            pointer = tl.max_contiguous(basis + channel * RANK + direction, (1, 4))
            directions = tl.load(pointer, mask=direction < RANK, other=0.0).to(OPERAND)
            turned = _turned(own, cos, sin, token - program * T, block * 16, D, T) if ROTATED else own
            raw = tl.dot(turned, directions, raw, input_precision="ieee")
    _store_codes(packed, codes_out, row, valid, D - 16, D, BITS)
    if RANK:
        mask = valid[:, None] & (direction < RANK)
        # The coefficients project what decoding misses, which is minus the error of the codes.
        tl.store(raw_out + row[:, None] * RANK + direction, -raw, mask=mask)
        size = tl.max(tl.where(mask, tl.abs(raw), 0.0), axis=1)
        tl.store(raw_peaks_out + n * tl.num_programs(0) + program, tl.max(size, axis=0))


@triton.jit(do_not_specialize=LENGTHS)
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
    top = round_bf16(tl.div_rn(largest_of_tiles(peaks, n, tiles, 1024), 7.0))
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
    # A tile's errors of all channels stay in registers.
    tile = TILE if width <= 128 else TILE // 2
    groups, tiles = match.wanted.shape[-1], ceil_div(tokens, tile)
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
        x, book.codes.view(torch.int16), book.grid, match.ids, match.wanted, match.peaks,
        _factors(scale_bits, per_octave, x.device),
        unused if feedback is None else feedback.contiguous(), unused if basis is None else basis.contiguous(),
        *((unused, unused) if rotation is None else (t.contiguous() for t in rotation.tensors)),
        codes, scales, top, raw, raw_peaks,
        tokens, match.peaks.shape[-1], heads, count, 1 if feedback is None else feedback.shape[0], *x.stride()[:3],
    )  # fmt: skip
    launch(
        _residual_kernel, (tiles, n), arguments,
        D=width, T=tile, BITS=bits,
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
        _coefficient_kernel, (n, ceil_div(tokens, COEFFICIENT_TILE)),
        (raw, peaks, factors, packed, scales, factor, tokens, peaks.shape[-1]),
        RANK=rank, RP=max(2, next_power(rank)), T=COEFFICIENT_TILE,
        SCALE_BITS=ROW_SCALE_BITS, PER_OCTAVE=ROW_SCALE_PER_OCTAVE, enable_fp_fusion=False,
    )  # fmt: skip
    return {"k_psac_c": packed, "k_psac_c_scales": scales, "k_psac_c_factor": factor}

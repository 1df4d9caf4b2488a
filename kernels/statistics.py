"""What the queries tell: their second moment, its leading directions, and the weights of error feedback.

The two small matrix problems run as one program per head.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..quantwm_core import backends
from ..quantwm_core.backends import Between, OneOf
from ..quantwm_core.codec.feedback import BLOCK, DAMPING
from .encode_tiles import as_operand, head_pointer
from .launching import in_rows, launch
from .sizes import LENGTHS, ceil_div, next_power

# Widest head, and most directions, that fit in the registers and the shared memory of one program.
WIDEST = 128
LARGEST_RANK = 16
# A program sums the products of a share of the tokens for one tile of a moment: enough of them keep a GPU busy.
MOMENT_TILE = 64
MOMENT_TOKENS = 128
MOMENT_PROGRAMS = 144
MOST_SHARES = 8
MOMENT_LAUNCH = {"num_warps": 4, "num_stages": 3}
BASIS_LAUNCH = {"num_warps": 8, "num_stages": 1}
POWER_STEPS = 4
JACOBI_SWEEPS = tl.constexpr(2)
ROWS = tl.constexpr(BLOCK)
COLUMNS = tl.constexpr(32)
GOLDEN_ANGLE = tl.constexpr(2.399963)
# Three products of TF32 parts: as exact as float32, on the matrix units.
EXACT = tl.constexpr("tf32x3")


@triton.jit
def _sum_of_products(
    left, right, first, last, stride_s, real_row, real_column,
    W: tl.constexpr, T: tl.constexpr, SAME: tl.constexpr,
):  # fmt: skip
    """Sum over tokens of products of channels `left` and `right`, pointers `[1, W]` of token 0: float32 `[W, W]`."""
    total = tl.zeros((W, W), tl.float32)
    for start in range(first, last, T):
        token = start + tl.arange(0, T)[:, None]
        at = token.to(tl.int64) * stride_s
        x = as_operand(tl.load(left + at, mask=(token < last) & real_row, other=0.0))
        y = x if SAME else as_operand(tl.load(right + at, mask=(token < last) & real_column, other=0.0))
        total = tl.dot(tl.trans(x), y, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=LENGTHS)
def _moment_kernel(
    queries, moment, shares, arrived, tokens, heads, stride_b, stride_s, stride_h,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr, SHARES: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Mean of q q^T over tokens; one program a head, share of the tokens, and tile of the upper half of the moment.

    Whichever program of a tile comes last adds the shares of all, always in the same order.
    """
    tiles: tl.constexpr = (D + W - 1) // W
    share, tile = tl.program_id(0), tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    if tile % tiles < tile // tiles:
        return
    row = (tile // tiles) * W + tl.arange(0, W)
    column = (tile % tiles) * W + tl.arange(0, W)
    base = head_pointer(queries, n, heads, stride_b, stride_h)
    left, right = base + row[None, :], base + column[None, :]
    real_row, real_column = (row < D)[None, :], (column < D)[None, :]
    length = tl.cdiv(tokens, SHARES * T) * T
    first = share * length
    last = tl.minimum(first + length, tokens)
    if tile % tiles == tile // tiles:
        total = _sum_of_products(left, right, first, last, stride_s, real_row, real_column, W, T, True)
    else:
        total = _sum_of_products(left, right, first, last, stride_s, real_row, real_column, W, T, False)
    if SHARES > 1:
        place = n * (tiles * tiles) + tile
        own = shares + place * (SHARES * W * W) + tl.arange(0, W)[:, None] * W + tl.arange(0, W)[None, :]
        tl.store(own + share * (W * W), total)
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        if tl.atomic_add(arrived + place, 1, sem="acq_rel") < SHARES - 1:
            return
        total = tl.zeros((W, W), tl.float32)
        for other in tl.static_range(SHARES):
            total += tl.load(own + other * (W * W), cache_modifier=".cg")
    total /= tokens
    target = moment + n * D * D
    upper = target + row[:, None] * D + column[None, :]
    mask = (row < D)[:, None] & (column < D)[None, :]
    if ADD:
        total += tl.load(upper, mask=mask, other=0.0)
    tl.store(upper, total, mask=mask)
    tl.store(target + column[None, :] * D + row[:, None], total, mask=mask & (row[:, None] < column[None, :]))


@backends.register(
    "second_moment",
    "triton",
    constraints={
        "device": OneOf(("cuda",)),
        "capability": Between((8, 0)),
        "dtype": OneOf((torch.bfloat16, torch.float16)),
        "head_dim": Between(16, 256),
    },
    failures=(RuntimeError, triton.CompilationError),
)
def second_moment(queries: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """Mean of q q^T over tokens: `[B, T, H, D]` -> float32 `[B, H, D, D]`; added to `total` in place, if given."""
    if torch.compiler.is_compiling():
        if total is None:
            return _moment_of(queries)
        _add_moment(queries, total)
        return total
    return _second_moment(queries, total)


@torch.library.custom_op("quantwm::second_moment", mutates_args=(), schema="(Tensor queries) -> Tensor")
def _moment_of(queries):
    """The launch as an operator that torch.compile does not look into."""
    return _second_moment(queries, None)


@_moment_of.register_fake
def _(queries):
    batch, _, heads, width = queries.shape
    return queries.new_empty(batch, heads, width, width, dtype=torch.float32)


@torch.library.custom_op(
    "quantwm::add_second_moment", mutates_args=("total",), schema="(Tensor queries, Tensor(a!) total) -> ()"
)
def _add_moment(queries, total):
    """The same, added in place."""
    _second_moment(queries, total)


@_add_moment.register_fake
def _(queries, total):
    return None


def _second_moment(queries: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
    batch, tokens, heads, width = queries.shape
    queries = in_rows(queries)
    moment = queries.new_empty(batch, heads, width, width, dtype=torch.float32) if total is None else total
    n, tiles = batch * heads, ceil_div(width, MOMENT_TILE) ** 2
    shares = _share_count(n, tiles, tokens)
    parts, arrived = moment, moment
    if shares > 1:
        parts = queries.new_empty(n * tiles * shares * MOMENT_TILE**2, dtype=torch.float32)
        # Zeros of this call: kept for the next one, they would outlive the run, and a kernel that did not come to its
        # end, or a CUDA graph's memory, would spoil them.
        arrived = queries.new_zeros(n * tiles, dtype=torch.int32)
    launch(
        _moment_kernel, (shares, tiles, n), (queries, moment, parts, arrived, tokens, heads, *queries.stride()[:3]),
        D=width, W=MOMENT_TILE, T=MOMENT_TOKENS, SHARES=shares, ADD=total is not None, **MOMENT_LAUNCH,
    )  # fmt: skip
    return moment


@lru_cache
def _share_count(n: int, tiles: int, tokens: int) -> int:
    """Into how many shares to cut the tokens: a power of two, as a kernel is compiled for each."""
    side = math.isqrt(tiles)
    wanted = min(ceil_div(MOMENT_PROGRAMS, n * side * (side + 1) // 2), ceil_div(tokens, MOMENT_TOKENS), MOST_SHARES)
    return next_power(wanted)


@triton.jit
def _load_metric(metric, n, D: tl.constexpr, W: tl.constexpr):
    row = tl.arange(0, W)
    mask = (row < D)[:, None] & (row < D)[None, :]
    return tl.load(metric + n * D * D + row[:, None] * D + row[None, :], mask=mask, other=0.0)


@triton.jit
def _trace(matrix, W: tl.constexpr):
    row = tl.arange(0, W)
    return tl.sum(tl.sum(tl.where(row[:, None] == row[None, :], matrix, 0.0), axis=1), axis=0)


@triton.jit
def _times(moment, scale, q, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr):
    """scale M q for `q` `[W, R]`, a few columns of M at a time: whole, its parts overflow most GPUs' shared memory."""
    row = tl.arange(0, W)
    chunks: tl.constexpr = W // COLUMNS
    product = tl.zeros((W, R), tl.float32)
    for chunk in range(chunks):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)
        mask = (row < D)[:, None] & (column < D)[None, :]
        metric = tl.load(moment + row[:, None] * D + column[None, :], mask=mask, other=0.0) * scale
        mine = (tl.arange(0, chunks) == chunk)[:, None, None]
        part = tl.sum(tl.where(mine, tl.reshape(q, (chunks, COLUMNS, R)), 0.0), axis=0)
        product = tl.dot(metric, part, product, input_precision=EXACT)
    return product


@triton.jit
def _orthonormal(y, R: tl.constexpr):
    """Modified Gram-Schmidt on the columns of `[W, R]`; one that the others span, but for rounding, becomes zero."""
    column = tl.arange(0, R)[None, :]
    least = 1e-10 * tl.sum(y * y, axis=0)[None, :]
    for k in range(R):
        own = tl.sum(tl.where(column == k, y, 0.0), axis=1)
        square = tl.sum(own * own, axis=0)
        kept = square > tl.sum(tl.sum(tl.where(column == k, least, 0.0), axis=1), axis=0)
        own = own * tl.where(kept, 1.0 / tl.sqrt(tl.where(kept, square, 1.0)), 0.0)
        along = tl.sum(own[:, None] * y, axis=0)
        y = tl.where(column == k, own[:, None], y - tl.where(column > k, own[:, None] * along[None, :], 0.0))
    return y


@triton.jit
def _jacobi(small, R: tl.constexpr):
    """Eigenvalues `[R]` and vectors `[R, R]` of a symmetric matrix that is nearly diagonal already.

    Each round turns R / 2 disjoint pairs (i, i ^ round) at once, so that a sweep is R - 1 rounds.
    """
    i = tl.arange(0, R)[:, None]
    j = tl.arange(0, R)[None, :]
    vectors = tl.where(i == j, 1.0, 0.0)
    for turn in range(JACOBI_SWEEPS * (R - 1)):
        paired = j == (i ^ (turn % (R - 1) + 1))
        diagonal = tl.where(i == j, small, 0.0)
        mine = tl.sum(diagonal, axis=1)
        theirs = tl.sum(tl.where(paired, tl.sum(diagonal, axis=0)[None, :], 0.0), axis=1)
        off = tl.sum(tl.where(paired, small, 0.0), axis=1)
        lower = tl.arange(0, R) < (tl.arange(0, R) ^ (turn % (R - 1) + 1))
        # The angle that clears the pair's off-diagonal entry, the same for both of the pair.
        ratio = tl.where(lower, theirs - mine, mine - theirs) / tl.where(off != 0, 2.0 * off, 1.0)
        tangent = tl.where(ratio < 0, -1.0, 1.0) / (tl.abs(ratio) + tl.sqrt(1.0 + ratio * ratio))
        tangent = tl.where(off != 0, tangent, 0.0)
        cosine = 1.0 / tl.sqrt(1.0 + tangent * tangent)
        sine = tl.where(lower, tangent, -tangent) * cosine
        turned = tl.where(i == j, cosine[:, None], 0.0) + tl.where(paired, sine[:, None], 0.0)
        half = tl.dot(tl.trans(turned), small, input_precision=EXACT)
        small = tl.dot(half, turned, input_precision=EXACT)
        vectors = tl.dot(vectors, turned, input_precision=EXACT)
    return tl.sum(tl.where(i == j, small, 0.0), axis=1), vectors


@triton.jit
def _basis_kernel(
    moment, basis, D: tl.constexpr, W: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, R: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Subspace iteration with R >= 2 RANK vectors, then their best combinations by Rayleigh and Ritz."""
    n = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, W)
    column = tl.arange(0, R)
    moment += n * D * D
    mean = tl.sum(tl.load(moment + row * (D + 1), mask=row < D, other=0.0), axis=0) / D
    scale = tl.where(mean > 0, 1.0 / tl.where(mean > 0, mean, 1.0), 0.0)
    # Any dense start will do: columns of a moment that is nearly diagonal would never leave their channels.
    start = tl.cos((row[:, None] * (column[None, :] + 1)).to(tl.float32) * GOLDEN_ANGLE)
    q = _orthonormal(tl.where((row < D)[:, None], start, 0.0), R)
    for _ in range(STEPS):
        q = _orthonormal(_times(moment, scale, q, D, W, R), R)
    # Again: once leaves columns that were almost parallel only nearly orthogonal.
    q = _orthonormal(q, R)
    small = tl.dot(tl.trans(q), _times(moment, scale, q, D, W, R), input_precision=EXACT)
    values, vectors = _jacobi(small, R)
    rivals = tl.sum(tl.where(column[:, None] == column[None, :], values[:, None], 0.0), axis=0)[None, :]
    mine = values[:, None]
    ahead = (rivals > mine) | ((rivals == mine) & (column[None, :] < column[:, None]))
    place = RANK - 1 - tl.sum(ahead.to(tl.int32), axis=1)
    chosen = tl.where(place[:, None] == tl.arange(0, RP)[None, :], 1.0, 0.0)
    ritz = tl.dot(q, tl.dot(vectors, chosen, input_precision=EXACT), input_precision=EXACT)
    direction = tl.arange(0, RP)[None, :]
    pointer = basis + n * D * RANK + row[:, None] * RANK + direction
    tl.store(pointer, ritz, mask=(row < D)[:, None] & (direction < RANK))


def leading_eigenvectors(moment: torch.Tensor, rank: int) -> torch.Tensor:
    """bf16 `[N, D, rank]` for the largest eigenvalues of float `[N, D, D]`, largest last; D <= 128, rank <= 16."""
    n, width, _ = moment.shape
    basis = moment.new_empty(n, width, rank, dtype=torch.bfloat16)
    padded = max(16, next_power(rank))
    side = max(32, next_power(width))
    launch(
        _basis_kernel, (n,), (moment.contiguous(), basis),
        D=width, W=side, RANK=rank, RP=padded, R=min(2 * padded, side), STEPS=POWER_STEPS, **BASIS_LAUNCH,
    )  # fmt: skip
    return basis


@triton.jit
def _inverse(x):
    """Inverse of a positive definite `[16, 16]`, by Gauss and Jordan without pivoting."""
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, ROWS)[None, :]
    for k in range(ROWS):
        row = tl.sum(tl.where(i == k, x, 0.0), axis=0)[None, :]
        column = tl.sum(tl.where(j == k, x, 0.0), axis=1)[:, None]
        pivot = 1.0 / tl.sum(tl.sum(tl.where((i == k) & (j == k), x, 0.0), axis=1), axis=0)
        inner = x - column * row * pivot
        x = tl.where(i == k, tl.where(j == k, pivot, row * pivot), tl.where(j == k, -column * pivot, inner))
    return x


@triton.jit
def _without(metric, basis, n, D: tl.constexpr, W: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr):
    """(I - U U^T) M (I - U U^T) as M - U Z^T - Z U^T."""
    row = tl.arange(0, W)[:, None]
    direction = tl.arange(0, RP)[None, :]
    mask = (row < D) & (direction < RANK)
    u = tl.load(basis + n * D * RANK + row * RANK + direction, mask=mask, other=0.0).to(tl.float32)
    y = tl.dot(metric, u, input_precision=EXACT)
    z = y - 0.5 * tl.dot(u, tl.dot(tl.trans(u), y, input_precision=EXACT), input_precision=EXACT)
    # U^T U is I only up to bf16; as in the eager twin the product stays symmetric either way.
    metric -= tl.dot(u, tl.trans(z), input_precision=EXACT)
    return metric - tl.dot(z, tl.trans(u), input_precision=EXACT)


@triton.jit
def _feedback_kernel(
    metric, basis, weights, damping, D: tl.constexpr, W: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr
):
    """Blocked factorisation M = N^T B N with N unit block lower triangular, from the last block of channels up.

    N without its diagonal is what `codec.feedback.feedback_matrix` computes.
    """
    n = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = W // ROWS
    row = tl.arange(0, W)
    inner = tl.arange(0, ROWS)
    work = _load_metric(metric, n, D, W)
    if RANK:
        work = _without(work, basis, n, D, W, RANK, RP)
    mean = _trace(work, W) / D
    work *= tl.where(mean > 0, 1.0 / tl.where(mean > 0, mean, 1.0), 0.0)
    work += tl.where(row[:, None] == row[None, :], damping, 0.0)
    for turn in range(D // ROWS):
        block = D // ROWS - 1 - turn
        mine = (tl.arange(0, blocks) == block)[:, None, None]
        panel = tl.sum(tl.where(mine, tl.reshape(work, (blocks, ROWS, W)), 0.0), axis=0)
        here = (tl.arange(0, blocks) == block)[None, :, None]
        square = tl.sum(tl.where(here, tl.reshape(panel, (ROWS, blocks, ROWS)), 0.0), axis=1)
        solved = tl.dot(_inverse(square), panel, input_precision=EXACT)
        solved = tl.where((row < block * ROWS)[None, :], solved, 0.0)
        pointer = weights + n * D * D + (block * ROWS + inner)[:, None] * D + row[None, :]
        tl.store(pointer, solved, mask=(row < D)[None, :])
        work -= tl.dot(tl.trans(panel), solved, input_precision=EXACT)


def feedback_weights(metric: torch.Tensor, basis: torch.Tensor | None = None) -> torch.Tensor:
    """Weights bf16 `[N, D, D]` of `feedback_matrix` for float `[N, D, D]`, without the directions of bf16 `[N, D, R]`.

    D <= 128, a multiple of 16.
    """
    n, width, _ = metric.shape
    weights = metric.new_empty(n, width, width, dtype=torch.bfloat16)
    rank = 0 if basis is None else basis.shape[-1]
    metric, side = metric.contiguous(), max(16, next_power(width))
    launch(
        _feedback_kernel, (n,), (metric, metric if basis is None else basis.contiguous(), weights, DAMPING),
        D=width, W=side, RANK=rank, RP=max(16, next_power(rank)),
        # With eight warps Triton 3.6 gives a program that reads out of bounds where the head is 64 channels wide.
        num_warps=8 if side == WIDEST else 4, num_stages=1,
    )  # fmt: skip
    return weights

"""Error feedback across channels: each block of channels is rounded knowing what the blocks before it got wrong.

For a metric M (queries' second moment for keys, the output projection's Gram matrix for values) the cost of an
error e is e^T M e. Writing M = N^T D N with N unit lower triangular, channel i should aim at x_i - sum_{j<i} N_ij e_j:
the same triangular rule as GPTQ (arXiv 2210.17323) applies to weights, here on activations and in blocks of channels,
so that it is a handful of matrix products. It changes which codes are stored, never how many.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCK = 16
DAMPING = 0.1


def feedback_matrix(metric: torch.Tensor) -> torch.Tensor:
    """Strictly block-lower-triangular weights bf16 `[N, D, D]` for symmetric positive semidefinite `[N, D, D]`."""
    channels = metric.shape[-1]
    device = metric.device
    work = metric.float()
    mean = work.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    eye = torch.eye(channels, device=device)
    work = torch.where(mean > 0, work / mean, 0.0) + DAMPING * eye
    # M = C C^T with C upper triangular is the Cholesky factorisation of M with both axes reversed.
    # Damping keeps it regular, so nothing is checked: a check would make the device wait.
    upper = torch.linalg.cholesky_ex(work.flip(-1, -2), check_errors=False).L.flip(-1, -2)
    unit_lower = (upper / upper.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)).transpose(-1, -2)
    block = torch.arange(channels, device=device) // BLOCK
    within = (block[:, None] == block[None, :]) * unit_lower
    weights = torch.linalg.solve_triangular(within, unit_lower, upper=False, unitriangular=True)
    return (weights * (block[:, None] > block[None, :])).bfloat16()


def packed_weights(weights: torch.Tensor) -> torch.Tensor:
    """The part of `feedback_matrix` that is not zero, for keeping: bf16 `[N, D, D]` -> `[N, packed_count(D)]`."""
    starts = range(BLOCK, weights.shape[-1], BLOCK)
    rows = [weights[:, start : start + BLOCK, :start].flatten(1) for start in starts]
    return torch.cat(rows, dim=1) if rows else weights.new_zeros(len(weights), 0)


def unpacked_weights(packed: torch.Tensor, channels: int) -> torch.Tensor:
    """`[N, channels, channels]` as `feedback_matrix` gives it, from `packed_weights`."""
    weights = packed.new_zeros(packed.shape[0], channels, channels)
    taken = 0
    for start in range(BLOCK, channels, BLOCK):
        rows = weights[:, start : start + BLOCK, :start]
        count = rows.shape[1] * start
        rows.copy_(packed[:, taken : taken + count].unflatten(1, (rows.shape[1], start)))
        taken += count
    return weights


def packed_count(channels: int) -> int:
    """Numbers that `packed_weights` keeps of one matrix."""
    return sum(min(BLOCK, channels - start) * start for start in range(BLOCK, channels, BLOCK))


def quantize_with_feedback(
    residual: torch.Tensor,
    weights: torch.Tensor | None,
    rounding: Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `[N, S, D]` block of channels by block of channels.

    Args:
        residual: float `[N, S, D]`.
        weights: from `feedback_matrix`, or None for plain rounding.
        rounding: (target `[N, S, block]`, channel slice) -> (codes uint8, decoded float) of that block.

    Returns:
        codes uint8 `[N, S, D]` and decoded values float `[N, S, D]`.
    """
    channels = residual.shape[-1]
    if weights is None:
        return rounding(residual, slice(0, channels))
    weights = weights.float()
    codes = torch.empty_like(residual, dtype=torch.uint8)
    decoded = torch.empty_like(residual)
    owed = torch.zeros_like(residual)
    for start in range(0, channels, BLOCK):
        part = slice(start, min(start + BLOCK, channels))
        codes[..., part], decoded[..., part] = rounding(residual[..., part] - owed[..., part], part)
        # Errors are passed on in bf16, which is what matrix units take.
        error = (decoded[..., part] - residual[..., part]).bfloat16().float()
        owed += error @ weights[:, :, part].transpose(1, 2)
    return codes, decoded

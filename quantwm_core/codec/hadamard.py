"""Orthonormal rotations from Hadamard matrices, which spread an outlier channel over all others (QuaRot)."""

from __future__ import annotations

import functools
import math

import torch


@functools.lru_cache
def hadamard_rotation(width: int) -> torch.Tensor:
    """Orthonormal float32 `[width, width]` on the CPU; rotate rows `x` by `x @ R`, and back by `x @ R.T`.

    A Hadamard matrix where one can be built (every power of two; 48, 80, 96, ...). Other widths are cut into powers of
    two, from the largest on, and each piece is rotated by itself.
    """
    whole = hadamard(width)
    if whole is not None:
        return (whole / math.sqrt(width)).float()
    sizes = [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
    return torch.block_diag(*(hadamard(size) / math.sqrt(size) for size in sizes)).float()


def hadamard(order: int) -> torch.Tensor | None:
    """Signs float64 `[order, order]` with orthogonal rows, by Sylvester's doubling of Paley's matrices, else None."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.double)
    half = hadamard(order // 2) if order % 2 == 0 else None
    if half is not None:
        return torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.double), half)
    return _paley(order - 1) if order % 4 == 0 and _is_prime(order - 1) else None


def _paley(prime: int) -> torch.Tensor:
    """Order `prime` + 1, for primes that leave 3 on division by 4: identity plus a skew matrix of residue signs."""
    squares = {i * i % prime for i in range(1, prime)}
    signs = [0] + [1 if i in squares else -1 for i in range(1, prime)]
    matrix = torch.eye(prime + 1, dtype=torch.double)
    matrix[0, 1:], matrix[1:, 0] = 1, -1
    for row in range(prime):
        for column in range(prime):
            matrix[row + 1, column + 1] += signs[(row - column) % prime]
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))

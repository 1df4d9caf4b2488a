"""Sizes of grids and tiles. Triton's own helpers are meant for kernels and cost several microseconds a call outside."""

from __future__ import annotations


def ceil_div(count: int, size: int) -> int:
    """Pieces of `size` that cover `count`."""
    return -(-count // size)


def next_power(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << max(0, count - 1).bit_length()

"""Sizes of grids and tiles. Triton's own helpers are meant for kernels and cost several microseconds a call outside."""

from __future__ import annotations

# Arguments of kernels that follow from the length of a block or a history. Triton compiles nothing anew where they are
# 1 or divisible by 16: what is read in words is not aligned by them. Of what bounds a loop over tiles of tokens it had
# better know: rounds of k-means took 19 % longer without, and looking for the nearest centroid has more to do.
COUNTS = ["count", "parts"]
LENGTHS = [*COUNTS, "tokens", "tiles", "tile_count", "live_tokens", "live_start", "origin", "query_count"]


def ceil_div(count: int, size: int) -> int:
    """Pieces of `size` that cover `count`."""
    return -(-count // size)


def next_power(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << max(0, count - 1).bit_length()

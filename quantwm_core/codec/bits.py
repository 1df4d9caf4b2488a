"""Small unsigned integers packed into bytes along the last axis."""

from __future__ import annotations

import torch


def packed_width(count: int, bits: int) -> int:
    """Bytes that `count` values of `bits` bits take."""
    return -(-count * bits // 8)


def pack_bits(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers below 2**bits into bytes; the first value sits in the lowest bits.

    Args:
        values: uint8 `[..., n]`.
        bits: 1, 2, 4 or 8.

    Returns:
        uint8 `[..., packed_width(n, bits)]`; a ragged last byte is filled with zeros.
    """
    if bits == 8:
        return values.contiguous()
    per_byte = 8 // bits
    missing = -values.shape[-1] % per_byte
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    lanes = values.unflatten(-1, (-1, per_byte))
    packed = lanes[..., 0].clone()
    for lane in range(1, per_byte):
        packed |= lanes[..., lane] << (bits * lane)
    return packed


def unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Inverse of `pack_bits`: uint8 `[..., count]`."""
    if bits == 8:
        return packed[..., :count]
    mask = (1 << bits) - 1
    lanes = [(packed >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(lanes, dim=-1).flatten(-2)[..., :count]

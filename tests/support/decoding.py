"""What a layer holds, decoded by the kernels and by their eager twin."""

from __future__ import annotations

import torch


def decode_both(pack, layer, live_tokens=5):
    """Keys and values by the eager twin and by the kernel, into poisoned workspaces."""
    first = layer.entries[0].stored
    shape, dtype = (first.batch, first.heads, first.head_dim), first.dtype
    device = next(iter(first.tensors.values())).device
    live = torch.randn(2, shape[0], live_tokens, *shape[1:], device=device).to(dtype)
    pieces = [entry.stored for entry in layer.entries] + [pack.span.RawBlock(*live)]
    total = sum(piece.tokens for piece in pieces)
    expected, actual = torch.full((2, 2, shape[0], total, *shape[1:]), float("nan"), dtype=dtype, device=device)
    pack.operations.decode_layer(layer.method, pieces, *expected)
    pack.decode.decode_layer(layer.method, pieces, *actual)
    return expected, actual

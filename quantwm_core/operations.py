"""Eager twins of the operations that kernels may take over; see `backends`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from .backends import eager
from .jensen import attend_corrected
from .span import PackedSpan, RawBlock

if TYPE_CHECKING:
    from .methods import LayerState, Method
    from .query_stats import QueryStats

Piece = RawBlock | PackedSpan


@eager
def encode_span(method: Method, k: torch.Tensor, v: torch.Tensor, stats: QueryStats, state: LayerState) -> PackedSpan:
    """Pack keys and values `[B, S, H, D]` as `method.encode` does."""
    return method.encode(k, v, stats, state)


@eager
def decode_layer(method: Method, pieces: Sequence[Piece], keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write the pieces' keys and values, one after the other, into `keys` and `values` `[B, total, H, D]`."""
    start = 0
    for piece in pieces:
        part = slice(start, start + piece.tokens)
        if isinstance(piece, PackedSpan):
            keys[:, part], values[:, part] = method.decode(piece.to(keys.device))
        else:
            keys[:, part], values[:, part] = piece.turned_k, piece.v
        start += piece.tokens


@eager
def attend_packed(
    queries: torch.Tensor,
    pieces: Sequence[Piece],
    method: Method,
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    read: Callable[[], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Attention of `queries` `[B, T, H, D]` over all pieces: read them as plain tensors, then `attention(q, k, v)`.

    Like the host's attention functions, `attention` and this return `[B, T, H * D]`. With the settings' `jensen` on,
    logits of rounded keys are corrected, which takes torch's attention in place of the host's.
    """
    jensen = method.settings.jensen
    if jensen != "off":
        out = attend_corrected(queries, pieces, method.key_steps, jensen == "exact", read)
        if out is not None:
            return out
    return attention(queries, *read())

"""Pieces that live on the CPU, copied to the device one layer ahead while the layer before it is busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .span import PackedSpan, RawBlock

Piece = RawBlock | PackedSpan


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`; from a GPU to the CPU into pinned memory, from which copies back can run aside."""
    if device.type == "cpu" and tensor.is_cuda:
        return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def piece_on(piece: Piece, device: torch.device) -> Piece:
    """The piece on `device`; itself when nothing has to move."""
    if isinstance(piece, RawBlock):
        if piece.k.device == device:
            return piece
        return RawBlock(moved(piece.k, device), moved(piece.v, device), rotation=piece.rotation)
    if all(t.device == device for t in piece.tensors.values()):
        return piece
    return replace(piece, tensors={name: moved(t, device) for name, t in piece.tensors.items()})


class LayerFetch:
    """The copies of one layer's pieces, from `start` until `take`; on the side stream `stream` where there is one."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream
        self._sources: list[Piece] = []
        self._copies: list[Piece] = []
        self._done: torch.cuda.Event | None = None

    def start(self, pieces: Sequence[Piece]) -> None:
        """Begin to copy; returns at once."""
        self._sources = list(pieces)
        if self._stream is None:
            self._copies = [piece_on(piece, self._device) for piece in pieces]
            return
        # What a span shares with others is on the device already, written by the stream that packs.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copies = [piece_on(piece, self._device) for piece in pieces]
            self._done = self._stream.record_event()

    def take(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces on the device, for the current stream; what was copied earlier serves while it is the same."""
        sources, copies, done = self._sources, self._copies, self._done
        self._sources, self._copies, self._done = [], [], None
        if len(sources) != len(pieces) or any(old is not new for old, new in zip(sources, pieces)):
            return [piece_on(piece, self._device) for piece in pieces]
        if done is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(done)
            for source, copy in zip(sources, copies):
                if copy is not source:
                    _use_on(copy, current)
        return copies


def _use_on(piece: Piece, stream: torch.cuda.Stream) -> None:
    """Keep the side stream from reusing the piece's memory before `stream` has read it."""
    tensors = (piece.k, piece.v) if isinstance(piece, RawBlock) else piece.tensors.values()
    for tensor in tensors:
        tensor.record_stream(stream)

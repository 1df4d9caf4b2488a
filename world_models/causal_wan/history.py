"""What a sampler does to the history of a run beside adding to it: blocks leave, on the host's cache or on ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ...quantwm_core.window import Block, RolloutSettings
from .run import PackedLayer


class History(Protocol):
    """The history of one run, as the sampler sees it."""

    def announce_clean_pass(self, frames: Sequence[int]) -> None:
        """The coming pass makes history, whatever its noise level: blocks of so many frames each."""

    def retire(self, blocks: Sequence[Block]) -> None:
        """Take blocks out of reach."""


def open_history(caches: list, settings: RolloutSettings, frame_tokens: int) -> History:
    """The history behind what `init_kv_caches` gave: packed layers of ours, or the host's plain tensors."""
    if isinstance(caches[0], PackedLayer):
        return PackedHistory(caches[0], frame_tokens)
    return HostHistory(caches, settings, frame_tokens)


class HostHistory:
    """The host's dictionaries of `k`, `v` and `end`: what stays moves to the front, so that they need no more room."""

    def __init__(self, caches: list[dict], settings: RolloutSettings, frame_tokens: int) -> None:
        self._caches = caches
        self._sink = settings.sink
        self._frame_tokens = frame_tokens
        self._sink_frames = 0

    def announce_clean_pass(self, frames: Sequence[int]) -> None:
        pass

    def retire(self, blocks: Sequence[Block]) -> None:
        """Close the gap that the blocks leave behind the sink; there is never another."""
        self._sink_frames = self._sink_frames or (blocks[0].first_frame if self._sink else 0)
        gap = sum(block.frames for block in blocks) * self._frame_tokens
        start = self._sink_frames * self._frame_tokens
        for cache in self._caches:
            end = cache["end"]
            for side in ("k", "v"):
                tensor: torch.Tensor = cache[side]
                tensor[:, start : end - gap] = tensor[:, start + gap : end].clone()
            cache["end"] = end - gap


class PackedHistory:
    """Our cache: whole packed blocks leave."""

    def __init__(self, layer: PackedLayer, frame_tokens: int) -> None:
        self._run = layer.run
        self._frame_tokens = frame_tokens

    def announce_clean_pass(self, frames: Sequence[int]) -> None:
        self._run.announce_clean_pass([count * self._frame_tokens for count in frames])

    def retire(self, blocks: Sequence[Block]) -> None:
        self._run.cache.retire([block.number for block in blocks])

"""How long the blocks of a run are and how far a window reaches, as far as can be told before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...quantwm_core.packing import TYPICAL_BLOCK, Reach
from ...quantwm_core.window import RolloutSettings
from ..lingbot import AttentionWindow


@dataclass(frozen=True)
class Extent:
    """Tokens of the largest block, or of the frames that are given, and how a window divides the history."""

    tokens: int = TYPICAL_BLOCK
    reach: Reach = Reach()


def extent_of(
    network: Any, shape: Sequence[int], given: int, rollout: RolloutSettings, window: AttentionWindow | None
) -> Extent:
    """Of a run on a latent `[B, C, T, H, W]` that begins with `given` frames.

    window: of a model that rolls its cache itself.
    """
    _, patch_height, patch_width = network.patch_size
    frame_tokens = -(-shape[3] // patch_height) * -(-shape[4] // patch_width)
    block = rollout.frames_per_block
    tokens = max(block, given) * frame_tokens
    if window is not None:
        return Extent(tokens, Reach(blocks=max(1, (window.size - window.sink) // block - 1)))
    if not rollout.window:
        return Extent(tokens)
    first, sink = 0, 0
    for length in (*rollout.block_lengths(given), *rollout.block_lengths(max(0, shape[2] - given))):
        sink += first < rollout.sink
        first += length
    return Extent(tokens, Reach(sink, max(1, rollout.window // block)))

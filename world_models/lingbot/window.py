"""The uncompressed cache of a rolling window: the first frames and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionWindow:
    """How much a block may look at, in latent frames: `size` in all, itself included, `sink` of them the very first.

    Raises:
        ValueError: when no room is left for a block behind the sink.
    """

    size: int
    sink: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.sink < self.size:
            raise ValueError(
                f"window must be larger than sink, and sink at least 0; got window {self.size} and sink {self.sink}. "
                "LingBot-World v2 uses 18 and 6; window 0 keeps everything."
            )

    def check_block(self, frames: int) -> None:
        """Raise ValueError when a block of `frames` does not fit behind the sink."""
        if frames > self.size - self.sink:
            raise ValueError(
                f"a block of {frames} latent frames needs a window of at least {self.sink + frames} (the sink of "
                f"{self.sink}, and the block); got {self.size}. Raise window, or lower the sampler's frames a block."
            )


class WindowCache(dict):
    """Keys and values `[B, S, H, D]` of one layer in full precision: `k`, `v` and `end`, as in the host's own cache.

    `end` counts the tokens held; lowering it forgets the newest. Storage is made at the first write, because only then
    is known how long the window is, and in what type keys are computed (not that of the weights, where these are fp8).
    """

    def __init__(self, max_tokens: int, batch: int, heads: int, head_dim: int, device, dtype: torch.dtype) -> None:
        nothing = torch.zeros(batch, 0, heads, head_dim, device=device, dtype=dtype)
        super().__init__(k=nothing, v=nothing, end=0)
        self._capacity = max_tokens

    def make_room(self, tokens: int, window: int, sink: int) -> None:
        """Forget the oldest tokens behind the first `sink`, so that `tokens` more make `window` at the most."""
        self._capacity = min(self._capacity, window)
        end = self["end"]
        surplus = end + tokens - window
        if surplus <= 0:
            return
        for tensor in (self["k"], self["v"]):
            tensor[:, sink : end - surplus] = tensor[:, sink + surplus : end].clone()
        self["end"] = end - surplus

    def write(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a block and return everything held: keys and values `[B, end, H, D]`."""
        if not self["k"].shape[1]:
            batch, _, heads, head_dim = k.shape
            self.update({side: k.new_zeros(batch, self._capacity, heads, head_dim) for side in "kv"})
        start, end = self["end"], self["end"] + k.shape[1]
        self["k"][:, start:end] = k
        self["v"][:, start:end] = v
        self["end"] = end
        return self["k"][:, :end], self["v"][:, :end]

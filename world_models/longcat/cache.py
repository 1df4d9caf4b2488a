"""Keys and values of the given frames during one run: in full precision, or packed.

Both are asked by the conditional and the unconditional prompt alike. The published code keeps keys before RoPE and
turns them at every read. Packed spans do so as well; in full precision they are turned once, which gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from comfy.ldm.flux.math import apply_rope1

from ...quantwm_core import LayerCache, WorldCache
from ...quantwm_core.probe import LogitProbe
from ...quantwm_core.rotation import Rotation

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class GivenCache(Protocol):
    """What the network asks of a cache; keys, values and queries are `[B, S, H, D]`."""

    frames: int

    def begin(self, frames: int, freqs: torch.Tensor) -> None:
        """So many given frames are about to be stored, layer by layer; `freqs` `[1, S, 1, D / 2, 2, 2]` turn them."""

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, asking: torch.Tensor) -> None:
        """Keep keys before RoPE and values; `asking` are noisy queries after RoPE, of no tokens without a rehearsal."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Attention `[B, T, H * D]` over the given frames and the noisy ones, whose queries and keys are turned.

        B may be a multiple of the cache's batch: one part for each prompt.
        """


class PlainCache:
    """In the type in which they are computed; on the CPU, each layer is copied to the device when it attends."""

    def __init__(self, on_cpu: bool = False) -> None:
        self.frames = 0
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._on_cpu = on_cpu
        self._freqs: torch.Tensor | None = None

    def begin(self, frames: int, freqs: torch.Tensor) -> None:
        self.frames, self._freqs = frames, freqs

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, asking: torch.Tensor) -> None:
        pair = (apply_rope1(k, self._freqs), v)
        self.held.append(tuple(t.cpu() if self._on_cpu else t.contiguous() for t in pair))

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        held = [t.to(q.device) for t in self.held[layer]]
        prompts = q.shape[0] // len(held[0])
        # A view where there is one video: joining copies it anyway.
        held = [t.expand(prompts, -1, -1, -1) if len(t) == 1 else t.repeat(prompts, 1, 1, 1) for t in held]
        keys, values = (torch.cat((given, live), dim=1) for given, live in zip(held, (k, v)))
        return attention(q, keys, values)


class PackedCache:
    """In few bits: each layer packs as soon as it has computed its keys and values, and the rehearsal has asked.

    Args:
        cache: a prefilled one.
    """

    def __init__(self, cache: WorldCache, probe: LogitProbe | None = None) -> None:
        self.frames = 0
        self.cache = cache
        self._probe = probe
        self._freqs: torch.Tensor | None = None
        self._rotation: Rotation | None = None

    def begin(self, frames: int, freqs: torch.Tensor) -> None:
        self.frames, self._freqs = frames, freqs
        turns = freqs[0, :, 0]
        self._rotation = Rotation(turns[..., 0, 0].contiguous(), turns[..., 1, 0].contiguous())

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, asking: torch.Tensor) -> None:
        if self._probe is not None:
            self._probe.commit(layer, apply_rope1(k, self._freqs), v)
        # Only what will be asked of them counts: the given frames themselves have met their keys unpacked.
        queries = asking if asking.shape[1] else None
        self.cache.layers[layer].append(k, v, queries, rotation=self._rotation)
        self.cache.commit(layer)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        batch, held = self.cache.geometry.batch, self.cache.layers[layer]
        prompts = list(zip(*(t.split(batch) for t in (q, k, v))))
        out = held.attend_each(prompts, attention)
        if self._probe is None:
            return out
        probed = [
            self._probe.attend(layer, q, held.read(k, v)[0], (k, v), attention, part)
            for (q, k, v), part in zip(prompts, out.split(batch))
        ]
        return torch.cat(probed)


def parts_of(cache: WorldCache) -> list[LayerCache]:
    """The layers of a cache, and where heads of a layer are kept apart, each of its groups."""
    return [part for layer in cache.layers for part in getattr(layer, "caches", (layer,))]

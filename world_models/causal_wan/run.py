"""One sampling run of a causal Wan model: its cache, and the face that cache shows to the host's sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from comfy.ldm.flux.math import apply_rope
from comfy.ldm.modules.attention import optimized_attention

from ...quantwm_core import CacheGeometry, CacheHandle, CacheSettings, LayerCache, WorldCache
from ...quantwm_core.accounting import build_record, joined_entries, native_record
from ...quantwm_core.memory import MemorySettings, kept_tokens, take_tokens
from ...quantwm_core.methods import Method
from ...quantwm_core.probe import LogitProbe
from ..output_metric import OutputMetric
from .extent import Extent
from .streams import CacheStreams

logger = logging.getLogger(__name__)

# Noise levels of the frames that rehearse: mostly the first step, whose queries have seen nothing of the new frames.
REHEARSAL_SIGMAS = (1.0, 1.0, 0.9)


class CausalWanRun:
    """State between the start and the end of one sampling run. Modules are looked up in the model being sampled."""

    def __init__(
        self,
        settings: CacheSettings,
        model: Any,
        handle: CacheHandle,
        on_block: Callable[[dict], None] | None,
        method: Method | None,
        probe: LogitProbe | None,
        memory: MemorySettings | None = None,
        conditionings: int = 1,
        extent: Extent | None = None,
    ) -> None:
        self.settings = settings
        self.extent = extent or Extent()
        # How many will be asked about, as far as the guider shows; a budget is shared by so many caches.
        self.conditionings = conditionings
        self.memory = memory or MemorySettings(retrieval="off")
        self.model = model
        self.handle = handle
        # What an earlier run left must not pass for this one's.
        handle.record = None
        handle.history.clear()
        self.clean = False
        # Share of a forward's tokens, at its end, that only rehearse.
        self.rehearsed_share = 0.0
        # Tokens of each block in the clean pass that is running, and of a frame, where a sampler has told.
        self.lengths: list[int] | None = None
        self.frame_tokens = 0
        self._rehearse = False
        self.device: torch.device | None = None
        self.dtype = model.get_dtype_inference()
        # One for each conditioning, in the order in which they were first asked.
        self.caches: list[WorldCache] = []
        self.streams: CacheStreams | None = None
        self._committed: list[dict] = []
        self._on_block = on_block
        self._method = method
        self.probe = probe

    @property
    def blocks(self):
        return self.model.diffusion_model.blocks

    def geometry(self, batch: int) -> CacheGeometry:
        network = self.model.diffusion_model
        return CacheGeometry(len(self.blocks), network.num_heads, network.head_dim, batch)

    @property
    def cache(self) -> WorldCache | None:
        """The cache of the conditioning that was asked first."""
        return self.caches[0] if self.caches else None

    def init_kv_caches(self, batch: int, max_tokens: int, device: torch.device, dtype: torch.dtype) -> CacheStreams:
        """Caches as the host's sampler expects them: one mapping with an `end` for each layer."""
        self.device = device
        network = self.model.diffusion_model

        def make() -> list:
            if self.settings.compresses:
                return self._packed_layers(batch)
            # The host passes the weights' type and fails where keys are computed in another (fp8 weights).
            return type(network).init_kv_caches(network, batch, max_tokens, device, self.dtype)

        def make_texts() -> list[dict]:
            return network.init_crossattn_caches(batch, device, dtype)

        self.streams = CacheStreams(make(), make, make_texts, self.begin_pass, self._block_done)
        return self.streams

    def _packed_layers(self, batch: int) -> list[PackedLayer]:
        """A packed cache, as one conditioning sees it."""
        settings = self.settings
        if settings.budget_gb:
            settings = replace(settings, budget_gb=settings.budget_gb / self.conditionings)
        metrics = [OutputMetric(self, layer) for layer in range(len(self.blocks))]
        rest = self._committed.append, self.extent.tokens, self.extent.reach
        cache = WorldCache(settings, self.geometry(batch), self.device, metrics, self._method, *rest)
        for layer in cache.layers:
            layer.keeps_means = self.memory.retrieval == "similarity"
        self.caches.append(cache)
        return [PackedLayer(self, cache, layer) for layer in range(len(self.blocks))]

    def announce_clean_pass(self, lengths: list[int], frame_tokens: int) -> None:
        """The coming pass makes history, whatever its noise level: blocks of so many tokens each."""
        self.lengths, self.frame_tokens = lengths, frame_tokens
        self.streams.announce_clean_pass()

    def begin_pass(self, clean: bool, first: bool) -> None:
        """Note what the coming forward is, for one conditioning. Given frames get a clean pass before all others."""
        self.clean = clean
        wanted = any(layer.rehearses for cache in self.caches for layer in cache.layers)
        self._rehearse = first and clean and wanted

    def forward_block(self, x: torch.Tensor, timestep: torch.Tensor, **kwargs) -> torch.Tensor:
        """The host's forward; on the pass of given frames a few noisy frames ride along behind them.

        All generated frames will look back at the given ones with noisy queries first, and those point elsewhere than
        clean ones. The noise shows them, with the given frames as history, before these are packed. It is seen by
        nobody and stored nowhere.
        """
        network = self.model.diffusion_model
        original = type(network).forward_block
        frames, noisy = x.shape[2], len(REHEARSAL_SIGMAS)
        window = kwargs.get("window")
        if not self._rehearse or (window is not None and frames + noisy > window.size - window.sink):
            self._rehearse = False
            return original(network, x=x, timestep=timestep, **kwargs)
        sigmas = torch.tensor(REHEARSAL_SIGMAS, device=x.device)
        noise, late = self._rehearsal(x, sigmas), self.model.model_sampling.timestep(sigmas).to(timestep)
        late = late.expand(x.shape[0], -1)
        self.rehearsed_share = noisy / (frames + noisy)
        try:
            out = original(network, x=torch.cat((x, noise), 2), timestep=torch.cat((timestep, late), 1), **kwargs)
        finally:
            self._rehearse, self.rehearsed_share = False, 0.0
        return out[:, :, :frames]

    @staticmethod
    def _rehearsal(x: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
        """Frames as a denoiser meets them at `sigmas`, mixed as the host's sampler does, from the last given frame."""
        shape = (*x.shape[:2], len(sigmas), *x.shape[3:])
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(x.device)
        sigma = sigmas.view(1, 1, -1, 1, 1)
        return (sigma * noise + (1 - sigma) * x[:, :, -1:].float()).to(x.dtype)

    def finish(self) -> None:
        """Write the record, if anything was cached, and drop the cache."""
        if self.caches and self.cache.layers[-1].tokens:
            self.handle.record = build_record(self.caches)
        elif self.streams is not None and not self.caches:
            self.handle.record = self._native_record()
        elif self.streams is None:
            logger.warning(
                "QuantWM: this sampler made no KV cache, so nothing was packed. Use World Sampler or Sampler AR Video."
            )
        for cache in self.caches:
            cache.release()
        self.caches, self.streams = [], None

    def _block_done(self) -> None:
        """Report a block: every conditioning's cache has noted it in `_committed`."""
        if not self._committed:
            return
        entry = joined_entries(self._committed)
        self._committed.clear()
        self.handle.history.append(entry)
        if self._on_block is not None:
            self._on_block(entry)

    def _native_record(self) -> dict:
        first, caches = self.streams.streams[0].caches[0], self.streams.caches
        resident = sum(c[side].untyped_storage().nbytes() for c in caches for side in ("k", "v"))
        # Blocks that our sampler took out of the host's cache.
        bank = [kv for cache in caches for kv in cache.get("bank", {}).values()]
        banked = sum(t.untyped_storage().nbytes() for kv in bank for t in kv)
        tokens = first["end"] + sum(k.shape[1] for k, _ in first.get("bank", {}).values())
        record = native_record(
            self.settings, self.geometry(first["k"].shape[0]), tokens, resident + banked, len(self.streams.streams)
        )
        return record | {"bytes_bank": banked, "blocks_in_bank": len(first.get("bank", {}))}


class PackedLayer:
    """One layer's cache as the host's sampler handles it: it reads and lowers `end`, nothing else.

    While a block is denoised `end` runs ahead of what is stored, because the block's keys and values are recomputed
    by every pass and never leave it.
    """

    def __init__(self, run: CausalWanRun, cache: WorldCache, index: int) -> None:
        self._run = run
        self._cache = cache
        self._index = index
        self._ahead = 0
        self.must_choose = False

    @property
    def run(self) -> CausalWanRun:
        return self._run

    @property
    def layer(self) -> LayerCache:
        return self._cache.layers[self._index]

    def __getitem__(self, name: str) -> int:
        if name != "end":
            raise KeyError(f"a packed cache has no plain tensor {name!r}; method `off` keeps the host's own cache.")
        return self.layer.committed + self._ahead

    def __setitem__(self, name: str, value: int) -> None:
        if name != "end" or not 0 <= value <= self["end"]:
            raise KeyError(
                f"only `end` of a packed cache can be set, to at most {self['end']}; got {name!r} = {value}."
            )
        committed = self.layer.committed
        if value < committed:
            self.layer.rewind(committed - value)
        self._ahead = max(0, value - committed)

    def make_room(self, tokens: int, window: int, sink: int) -> None:
        """For a model that rolls its cache itself: forget the oldest tokens behind the first `sink`, so that `tokens`
        more make `window` at the most."""
        surplus = self.layer.committed + tokens - window
        if surplus > 0:
            self.layer.evict(sink, surplus)

    def forward(self, module, x: torch.Tensor, freqs: torch.Tensor, transformer_options: dict) -> torch.Tensor:
        """The host's cached self-attention of one layer, on a packed history."""
        if self._ahead:
            raise ValueError(
                "The sampler moved on without a clean pass at sigma 0, so the last block was never stored. "
                "Use World Sampler or Sampler AR Video, or set method to off."
            )
        batch, tokens, heads, width = *x.shape[:2], module.num_heads, module.head_dim
        q = module.norm_q(module.q(x)).view(batch, tokens, heads, width)
        k = module.norm_k(module.k(x)).view(batch, tokens, heads, width)
        # One call for both: on short blocks the caller is the limit, and this is its most expensive call.
        q, k = apply_rope(q, k, freqs)
        v = module.v(x).view(batch, tokens, heads, width)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            merged = (t.flatten(2) for t in (q, k, v))
            return optimized_attention(*merged, heads=q.shape[2], transformer_options=transformer_options)

        noisy = round(tokens * self._run.rehearsed_share)
        if noisy:
            rehearsed = attention(q[:, tokens - noisy :], k, v)
            self.layer.observe(q[:, tokens - noisy :])
            q, k, v = (t[:, : tokens - noisy] for t in (q, k, v))
        out = self._attend(q, k, v, attention)
        return module.o(torch.cat((out, rehearsed), dim=1) if noisy else out)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Callable) -> torch.Tensor:
        """Attention over history and the block; on the clean pass the block then becomes history."""
        layer = self.layer
        # A probe watches one conditioning: the first, which is the prompt.
        probe = self._run.probe if self._cache is self._run.cache else None
        if self.must_choose:
            layer.recall_similar(q, self._run.memory.blocks)
            self.must_choose = False
        out = layer.attend(q, k, v, attention)
        if probe is not None:
            out = probe.attend(self._index, q, layer.read(k, v)[0], (k, v), attention, out)
        if not self._run.clean:
            layer.observe(q)
            self._ahead = q.shape[1]
            return out
        if probe is not None:
            probe.commit(self._index, k, v)
        k, v, lengths = self._thinned(k, v)
        layer.append(k, v, q, lengths)
        self._cache.commit(self._index)
        return out

    def _thinned(self, k: torch.Tensor, v: torch.Tensor) -> tuple:
        """Keys, values and block lengths `[...]` of a clean pass, without the tokens that compression leaves out."""
        lengths = self._run.lengths
        if lengths is None or self._run.memory.keep == 1:
            return k, v, lengths
        parts = []
        for keys, values in zip(k.split(lengths, 1), v.split(lengths, 1)):
            tokens = kept_tokens(keys, self._run.frame_tokens, self._run.memory.keep)
            parts.append((keys, values) if tokens is None else (take_tokens(keys, tokens), take_tokens(values, tokens)))
        lengths = [keys.shape[1] for keys, _ in parts]
        return torch.cat([keys for keys, _ in parts], 1), torch.cat([values for _, values in parts], 1), lengths

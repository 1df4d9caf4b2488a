"""One sampling run of a causal Wan model: its cache, and the face that cache shows to the host's sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from comfy.ldm.flux.math import apply_rope
from comfy.ldm.modules.attention import optimized_attention

from ...quantwm_core import CacheGeometry, CacheHandle, CacheSettings, LayerCache, WorldCache
from ...quantwm_core.accounting import native_record
from ...quantwm_core.memory import MemorySettings, kept_tokens, take_tokens
from ...quantwm_core.methods import Method
from ...quantwm_core.probe import LogitProbe
from ..output_metric import OutputMetric

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
    ) -> None:
        self.settings = settings
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
        self._announced: list[int] | None = None
        self._started = False
        self._rehearse = False
        self.device: torch.device | None = None
        self.dtype = model.get_dtype_inference()
        self.cache: WorldCache | None = None
        self._native: list[dict] | None = None
        self._on_block = on_block
        self._method = method
        self.probe = probe

    @property
    def blocks(self):
        return self.model.diffusion_model.blocks

    def geometry(self, batch: int) -> CacheGeometry:
        network = self.model.diffusion_model
        return CacheGeometry(len(self.blocks), network.num_heads, network.head_dim, batch)

    def init_kv_caches(self, batch: int, max_tokens: int, device: torch.device, dtype: torch.dtype) -> list:
        """Caches as the host's sampler expects them: one mapping with an `end` for each layer."""
        self.device = device
        if not self.settings.compresses:
            # The host passes the weights' type and fails where keys and values are computed in another (fp8 weights).
            network = self.model.diffusion_model
            self._native = type(network).init_kv_caches(network, batch, max_tokens, device, self.dtype)
            return self._native
        metrics = [OutputMetric(self, layer) for layer in range(len(self.blocks))]
        self.cache = WorldCache(
            self.settings, self.geometry(batch), device, metrics, self._method, self._block_committed
        )
        for layer in self.cache.layers:
            layer.keeps_means = self.memory.retrieval == "similarity"
        return [PackedLayer(self, layer) for layer in range(len(self.blocks))]

    def announce_clean_pass(self, lengths: list[int], frame_tokens: int) -> None:
        """The coming forward makes history, whatever its noise level: blocks of so many tokens each."""
        self._announced, self.frame_tokens = lengths, frame_tokens

    def begin_pass(self, clean: bool) -> None:
        """Note what the coming forward is. Given frames get a clean pass before anything was denoised."""
        self.lengths, self._announced = self._announced, None
        self.clean = clean or self.lengths is not None
        first, self._started = not self._started, True
        wanted = self.cache is not None and any(layer.rehearses for layer in self.cache.layers)
        self._rehearse = first and self.clean and wanted

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
        if self.cache is not None and self.cache.layers[-1].tokens:
            self.handle.record = self.cache.record()
        elif self._native is not None:
            self.handle.record = self._native_record()
        elif self.cache is None:
            logger.warning(
                "QuantWM: this sampler made no KV cache, so nothing was packed. Use World Sampler or Sampler AR Video."
            )
        if self.cache is not None:
            self.cache.release()
        self.cache = self._native = None

    def _block_committed(self, entry: dict) -> None:
        self.handle.history.append(entry)
        if self._on_block is not None:
            self._on_block(entry)

    def _native_record(self) -> dict:
        first = self._native[0]
        resident = sum(c[side].untyped_storage().nbytes() for c in self._native for side in ("k", "v"))
        # Blocks that our sampler took out of the host's cache.
        bank = [kv for cache in self._native for kv in cache.get("bank", {}).values()]
        banked = sum(t.untyped_storage().nbytes() for kv in bank for t in kv)
        tokens = first["end"] + sum(k.shape[1] for k, _ in first.get("bank", {}).values())
        record = native_record(self.settings, self.geometry(first["k"].shape[0]), tokens, resident + banked)
        return record | {"bytes_bank": banked, "blocks_in_bank": len(first.get("bank", {}))}


class PackedLayer:
    """One layer's cache as the host's sampler handles it: it reads and lowers `end`, nothing else.

    While a block is denoised `end` runs ahead of what is stored, because the block's keys and values are recomputed
    by every pass and never leave it.
    """

    def __init__(self, run: CausalWanRun, index: int) -> None:
        self._run = run
        self._index = index
        self._ahead = 0
        self.must_choose = False

    @property
    def run(self) -> CausalWanRun:
        return self._run

    @property
    def layer(self) -> LayerCache:
        return self._run.cache.layers[self._index]

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
        layer, probe = self.layer, self._run.probe
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
        self._run.cache.commit(self._index)
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

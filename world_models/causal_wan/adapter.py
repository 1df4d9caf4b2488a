"""Attach a packed cache to the host's CausalWanModel, through a clone, object patches and wrappers only.

Keys are cached after RoPE at absolute frame positions. The host denoises a block in several forwards that overwrite
the same cache slots, then runs one clean forward at sigma 0 whose keys and values become history. So a denoise pass
needs no storage across layers at all, and on the clean pass each layer packs its block at once.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ...quantwm_core import CacheHandle, CacheSettings
from ...quantwm_core.accounting import estimate_bytes
from ...quantwm_core.cache import check_backend
from ...quantwm_core.methods import Method
from ...quantwm_core.overrides import check_overrides
from ...quantwm_core.probe import LogitProbe
from ...quantwm_core.window import MAX_FRAMES_PER_BLOCK, RolloutSettings
from ..lingbot import AttentionWindow, window_of
from .extent import extent_of
from .run import CausalWanRun, PackedLayer
from .sampler import WorldSampler, given_latent
from .streams import ask_each_alone, count_conditionings

logger = logging.getLogger(__name__)

KEY = "quantwm"
INIT_PATH = "diffusion_model.init_kv_caches"
FORWARD_PATH = "diffusion_model.forward_block"
WRAPPERS = (
    WrappersMP.OUTER_SAMPLE,
    WrappersMP.PREPARE_SAMPLING,
    WrappersMP.CALC_COND_BATCH,
)


def supports(model: Any) -> bool:
    """Whether the model is the host's autoregressive Wan, by the interface that its sampler relies on."""
    network = getattr(model.model, "diffusion_model", None)
    return hasattr(network, "init_kv_caches") and hasattr(network, "forward_block")


def attach(
    model: Any,
    settings: CacheSettings,
    on_block: Callable[[dict], None] | None = None,
    method: Method | None = None,
    probe: LogitProbe | None = None,
) -> tuple[Any, CacheHandle]:
    """A patched clone and the handle of its runs; see `world_models.attach`."""
    patched = model.clone()
    detach(patched)
    adapter = CausalWanAdapter(settings, on_block, method, probe)
    network = model.model.diffusion_model
    check_backend(settings, network.head_dim, model.load_device)
    check_overrides(settings.overrides, len(network.blocks), network.num_heads)
    others = set(patched.object_patches)
    patched.add_object_patch(INIT_PATH, adapter.init_kv_caches)
    if settings.compresses:
        patched.add_object_patch(FORWARD_PATH, adapter.forward_block)
        for layer in range(len(network.blocks)):
            path = f"diffusion_model.blocks.{layer}.self_attn.forward"
            patched.add_object_patch(path, functools.partial(adapter.self_attention, layer))
    replaced = [path for path in others if patched.object_patches[path] is not model.object_patches.get(path)]
    if replaced:
        logger.warning("QuantWM replaces another node's patches on this model: %s.", ", ".join(sorted(replaced)))
    for kind, function in zip(WRAPPERS, (adapter.outer_sample, adapter.prepare_sampling, ask_each_alone)):
        patched.add_wrapper_with_key(kind, KEY, function)
    patched.add_callback_with_key(CallbacksMP.ON_CLEANUP, KEY, adapter.on_cleanup)
    return patched, adapter.handle


def _host_rollout(sampler: Any) -> RolloutSettings:
    """What the host's sampler has been told, as ours would be."""
    frames = getattr(sampler, "extra_options", {}).get("num_frame_per_block", 1)
    return RolloutSettings(min(frames, MAX_FRAMES_PER_BLOCK))


def detach(model: Any) -> None:
    """Take this pack's patches off a clone, so that a second Apply node replaces the first."""
    for path, patch in list(model.object_patches.items()):
        owner = getattr(getattr(patch, "func", patch), "__self__", None)
        if isinstance(owner, CausalWanAdapter):
            del model.object_patches[path]
    for kind in WRAPPERS:
        model.remove_wrappers_with_key(kind, KEY)
    model.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, KEY)


class CausalWanAdapter:
    """The patches of one Apply node. Holds settings; tensors only inside `run`, which exists while sampling."""

    def __init__(
        self,
        settings: CacheSettings,
        on_block: Callable[[dict], None] | None,
        method: Method | None,
        probe: LogitProbe | None,
    ) -> None:
        self.settings = settings
        self.handle = CacheHandle(settings)
        self.run: CausalWanRun | None = None
        self._on_block = on_block
        self._method = method
        self._probe = probe
        self._rollout = RolloutSettings()

    def outer_sample(self, executor, noise, latent_image, sampler, *args, **kwargs):
        """Give the run its state and take it away again, however the run ends."""
        guider = executor.class_obj
        ours = isinstance(sampler, WorldSampler)
        self._rollout, memory = (sampler.settings, sampler.memory) if ours else (_host_rollout(sampler), None)
        network, given = guider.model_patcher.model.diffusion_model, given_latent(guider.model_options)
        extent = None
        if noise.ndim == 5:
            frames = 0 if given is None else given.shape[2]
            extent = extent_of(network, noise.shape, frames, self._rollout, window_of(guider.conds))
        self.run = CausalWanRun(
            self.settings,
            guider.model_patcher.model,
            self.handle,
            self._on_block,
            self._method,
            self._probe,
            memory,
            count_conditionings(guider),
            extent,
        )
        try:
            return executor(noise, latent_image, sampler, *args, **kwargs)
        finally:
            self.finish()

    def on_cleanup(self, patcher) -> None:
        self.finish()

    def finish(self) -> None:
        """Write the record and drop every tensor of the run."""
        run, self.run = self.run, None
        if run is not None:
            run.finish()

    def prepare_sampling(self, executor, model, noise_shape, conds, *args, **kwargs):
        """Ask the host for the memory the cache will take: it estimates from the latent's shape and knows no cache."""
        if self.settings.compresses and len(noise_shape) == 5:
            noise_shape = self._with_cache(model, list(noise_shape), window_of(conds))
        return executor(model, noise_shape, conds, *args, **kwargs)

    def _with_cache(self, model, noise_shape: list[int], window: AttentionWindow | None) -> list[int]:
        """The latent shape that the host would estimate at its own need plus ours: more frames."""
        geometry = self.run.geometry(noise_shape[0])
        _, patch_height, patch_width = model.model.diffusion_model.patch_size
        given = given_latent(model.model_options)
        memory = self.run.memory
        frames = self._rollout.room(noise_shape[2], 0 if given is None else given.shape[2], memory.returning)
        if memory.retrieves and memory.bank_device == "gpu":
            # The bank is bounded in blocks or not at all.
            bank = memory.bank_blocks * self._rollout.frames_per_block or noise_shape[2]
            frames = min(noise_shape[2], frames + bank)
        frames = min(frames, window.size) if window else frames
        tokens = frames * math.ceil(noise_shape[3] / patch_height) * math.ceil(noise_shape[4] / patch_width)
        planned = estimate_bytes(self.settings, geometry, tokens, self.run.conditionings, self.run.extent.tokens)
        native = model.model.memory_required([noise_shape[0] * 2, *noise_shape[1:]])
        noise_shape[2] = math.ceil(noise_shape[2] * (1 + planned / max(native, 1)))
        return noise_shape

    def init_kv_caches(self, batch_size: int, max_seq_len: int, device: torch.device, dtype: torch.dtype) -> list:
        """Stands in for the model's method of that name."""
        self._require_run("init_kv_caches")
        return self.run.init_kv_caches(batch_size, max_seq_len, device, dtype)

    def forward_block(self, **kwargs) -> torch.Tensor:
        """Stands in for the model's method of that name, which the host calls with keywords."""
        self._require_run("forward_block")
        return self.run.forward_block(**kwargs)

    def self_attention(self, layer: int, x, freqs, kv_cache=None, transformer_options={}):  # noqa: B006
        """Stands in for `self_attn.forward` of block `layer`, with the host's signature."""
        self._require_run("self-attention")
        module = self.run.blocks[layer].self_attn
        if not isinstance(kv_cache, PackedLayer):
            return type(module).forward(module, x, freqs, kv_cache=kv_cache, transformer_options=transformer_options)
        return kv_cache.forward(module, x, freqs, transformer_options)

    def _require_run(self, name: str) -> None:
        if self.run is None:
            raise RuntimeError(
                f"QuantWM's cache exists only while a sampler runs; {name} was called outside. "
                "Use World Sampler or Sampler AR Video, or bypass Apply To World Model."
            )

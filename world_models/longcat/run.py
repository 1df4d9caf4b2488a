"""One sampling run of LongCat-Video: where the keys and values of the given frames live, and how they are filled in."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP

from ...quantwm_core import CacheGeometry, CacheHandle, CacheSettings, WorldCache
from ...quantwm_core.accounting import estimate_bytes, native_record
from ...quantwm_core.methods import Method
from ...quantwm_core.probe import LogitProbe
from ..output_metric import OutputMetric
from .cache import GivenCache, PackedCache, PlainCache, parts_of
from .network import RUN_KEY, LongCatModel, Rehearsal, Text

logger = logging.getLogger(__name__)

KEY = "quantwm"
# Noise levels of the frames that rehearse: mostly the first step's, whose queries have seen nothing of the new frames.
REHEARSAL_SIGMAS = (1.0, 1.0, 0.9)


def given_frames(denoise_mask: torch.Tensor | None) -> int:
    """How many frames at the start of a latent its noise mask `[B, C, T, H, W]` keeps as they are."""
    if denoise_mask is None or denoise_mask.ndim != 5:
        return 0
    made = (denoise_mask.amax(dim=(0, 1, 3, 4)) > 0).tolist()
    return made.index(True) if True in made else len(made)


class Runs:
    """What opens and closes runs on a MODEL, by two wrappers. Holds settings; tensors only within a run."""

    def __init__(
        self,
        settings: CacheSettings,
        on_block: Callable[[dict], None] | None = None,
        method: Method | None = None,
        probe: LogitProbe | None = None,
    ) -> None:
        self.settings = settings
        self.handle = CacheHandle(settings)
        self._on_block = on_block
        self._method = method
        self._probe = probe

    def attach(self, model: Any) -> None:
        """Take the place of whatever runs a MODEL had."""
        wrappers = {WrappersMP.OUTER_SAMPLE: self.outer_sample, WrappersMP.PREPARE_SAMPLING: self.prepare}
        for kind, function in wrappers.items():
            model.remove_wrappers_with_key(kind, KEY)
            model.add_wrapper_with_key(kind, KEY, function)

    def outer_sample(self, executor, noise, latent_image, sampler, sigmas, denoise_mask=None, *args, **kwargs):
        """Give the run its state and take it away again, however the run ends."""
        guider = executor.class_obj
        run = LongCatRun(
            self.settings,
            guider.model_patcher.model,
            self.handle,
            given_frames(denoise_mask),
            self._on_block,
            self._method,
            self._probe,
        )
        options = guider.model_options["transformer_options"]
        options[RUN_KEY] = run
        try:
            return executor(noise, latent_image, sampler, sigmas, denoise_mask, *args, **kwargs)
        finally:
            del options[RUN_KEY]
            run.finish()

    def prepare(self, executor, model, noise_shape, conds, model_options=None, **kwargs):
        """Ask the host for the memory the cache will take: it estimates from the latent's shape and knows no cache."""
        run = (model_options or {}).get("transformer_options", {}).get(RUN_KEY)
        if run is not None and run.frames:
            noise_shape = run.shape_with_cache(list(noise_shape))
        return executor(model, noise_shape, conds, model_options=model_options, **kwargs)


@dataclass(frozen=True)
class _Place:
    """The layers that compute on a device."""

    blocks: Any
    device: torch.device
    dtype: torch.dtype


class LongCatRun:
    """State between the start and the end of one sampling run.

    frames: given frames of the latent.
    """

    def __init__(
        self,
        settings: CacheSettings,
        model: Any,
        handle: CacheHandle,
        frames: int,
        on_block: Callable[[dict], None] | None = None,
        method: Method | None = None,
        probe: LogitProbe | None = None,
    ) -> None:
        self.settings = settings
        self.model = model
        self.handle = handle
        self.frames = frames
        # What an earlier run left must not pass for this one's.
        handle.record = None
        handle.history.clear()
        self.dtype = model.get_dtype_inference()
        self._on_block = on_block
        self._method = method
        self._probe = probe
        # One on each device: the host may give prompts to several.
        self._caches: dict[torch.device, PlainCache | PackedCache] = {}
        self._tokens = 0
        self._batch = 1

    def geometry(self, batch: int) -> CacheGeometry:
        network = self.model.diffusion_model
        return CacheGeometry(network.num_layers, network.num_heads, network.head_dim, batch)

    def shape_with_cache(self, noise_shape: list[int]) -> list[int]:
        """The latent shape that the host would estimate at its own need plus the cache's: more frames."""
        geometry, tokens = self.geometry(noise_shape[0]), self.frames * self._plane(*noise_shape[3:])
        if self.settings.compresses:
            # While a layer is packed, its keys and values exist in float32 and their rounded forms beside them.
            encoding = 4 * geometry.bytes_bf16(tokens) // geometry.layers
            planned = estimate_bytes(self.settings, geometry, tokens, block=tokens) + encoding
        else:
            planned = geometry.bytes_bf16(tokens) * self.dtype.itemsize // 2
            if self.settings.cache_device == "cpu":
                planned //= geometry.layers
        native = self.model.memory_required([noise_shape[0] * 2, *noise_shape[1:]])
        noise_shape[2] = math.ceil(noise_shape[2] * (1 + planned / max(native, 1)))
        return noise_shape

    def cache_for(
        self, network: LongCatModel, noisy: torch.Tensor, given: torch.Tensor, text: Text, options: dict
    ) -> GivenCache:
        """The cache of the given frames `[B, 16, n, H, W]`; the first forward of a run fills it.

        Raises:
            ValueError: when a later forward has other given frames than the first.
        """
        held = self._caches.get(given.device)
        if held is not None:
            if held.frames != given.shape[2]:
                raise ValueError(
                    f"all prompts of a run continue the same frames; this one gives {given.shape[2]} latent frames and "
                    f"an earlier one {held.frames}. Connect one LongCat Conditioning to all of them."
                )
            return held
        given = given[: max(1, len(given) // max(1, len(options.get("cond_or_uncond", (0,)))))]
        # Several videos from one start need its keys and values once.
        if len(given) > 1 and bool((given == given[:1]).all()):
            given = given[:1]
        cache = self._caches[given.device] = self._open(network, given)
        network.prefill(given, cache, options, self._rehearsal(cache, noisy, given, text))
        return cache

    def finish(self) -> None:
        """Write the record, if anything was cached, and drop the cache."""
        caches, self._caches = list(self._caches.values()), {}
        packed = [cache.cache for cache in caches if isinstance(cache, PackedCache)]
        cache = next(iter(caches), None)
        if packed and packed[0].layers[-1].tokens:
            self.handle.record = packed[0].record()
        elif isinstance(cache, PlainCache) and len(cache.held) == self.geometry(1).layers:
            resident = sum(t.untyped_storage().nbytes() for pair in cache.held for t in pair)
            self.handle.record = native_record(self.settings, self.geometry(self._batch), self._tokens, resident)
        elif not self.frames and self.settings.compresses:
            logger.warning("QuantWM: this run was given no frames to continue, so nothing was cached or packed.")
        for each in packed:
            each.release()

    def _open(self, network: LongCatModel, given: torch.Tensor) -> PlainCache | PackedCache:
        self._batch = given.shape[0]
        self._tokens = given.shape[2] * self._plane(*given.shape[3:])
        if not self.settings.compresses:
            return PlainCache(on_cpu=self.settings.cache_device == "cpu")
        place = _Place(network.blocks, given.device, self.dtype)
        metrics = [OutputMetric(place, layer) for layer in range(network.num_layers)]
        cache = WorldCache(
            self.settings,
            self.geometry(self._batch),
            given.device,
            metrics,
            self._method,
            self._block_committed,
            block=self._tokens,
            prefilled=True,
        )
        return PackedCache(cache, self._probe)

    def _plane(self, height: int, width: int) -> int:
        """Tokens of one latent frame."""
        _, patch_height, patch_width = self.model.diffusion_model.patch_size
        return math.ceil(height / patch_height) * math.ceil(width / patch_width)

    def _rehearsal(
        self, cache: PlainCache | PackedCache, noisy: torch.Tensor, given: torch.Tensor, text: Text
    ) -> Rehearsal | None:
        """Frames as the denoiser will meet them, at positions spread over those that are to be made.

        Nobody has asked anything before the given frames are packed. Noise at the levels of a run, mixed with the last
        given frame, asks much as the run will; it depends on nothing that is made later.
        """
        if not isinstance(cache, PackedCache) or not any(part.method.uses_queries for part in parts_of(cache.cache)):
            return None
        frames, count = given.shape[2], min(noisy.shape[2], len(REHEARSAL_SIGMAS))
        sigmas = torch.tensor(REHEARSAL_SIGMAS[:count], device=given.device)
        shape = (*given.shape[:2], count, *given.shape[3:])
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(given.device)
        level = sigmas.view(1, 1, -1, 1, 1)
        mixed = (level * noise + (1 - level) * given[:, :, -1:].float()).to(given.dtype)
        last = noisy.shape[2] - 1
        at = [frames + round(last * index / max(count - 1, 1)) for index in range(count)]
        timestep = self.model.model_sampling.timestep(sigmas)[None]
        return Rehearsal(mixed, at, timestep, text.first(given.shape[0]))

    def _block_committed(self, entry: dict) -> None:
        self.handle.history.append(entry)
        if self._on_block is not None:
            self._on_block(entry)

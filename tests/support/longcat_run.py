"""The small LongCat-Video of `longcat_case` in the real host: loaded and sampled as a graph would do it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable

import torch

from support import longcat_case as case


def _longcat():
    return importlib.import_module("quantwm_pack.world_models.longcat")


def load_model(shift: float = 12.0, zero_pad: bool = True, dtype: torch.dtype = torch.float32):
    """MODEL through the pack's builder, from the random weights of the case under their official names."""
    config = {"transformer": {"text_tokens_zero_pad": zero_pad}, "scheduler": {"shift": shift}}
    return _longcat().build(case.weights(), {"config": json.dumps(config)}, "small.safetensors", {"dtype": dtype})


def sigmas(version: case.Version) -> torch.Tensor:
    longcat = _longcat()
    if version.distilled:
        return longcat.distilled_sigmas(version.steps, version.shift)
    return longcat.sigmas(version.steps, version.shift, version.fine_ending)


def run(
    model,
    version: case.Version,
    seed: int = 0,
    given: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    marked: int | None = None,
    masked: int | None = None,
    callback: Callable | None = None,
) -> torch.Tensor:
    """Latents of a continuation through the host's guider and Euler sampler, in the network's normalisation.

    Args:
        given: normalised latent `[B, 16, n, H, W]` of the first frames; of no frames for text to video.
        marked: how many given frames the prompt speaks of; masked: how many the noise mask keeps.
    """
    import comfy.samplers

    given = case.given() if given is None else given
    noise = case.noise() if noise is None else noise
    if seed:
        noise = torch.randn(noise.shape, generator=torch.Generator().manual_seed(seed))
    count = given.shape[2]
    latent, mask = torch.zeros_like(noise), torch.ones(1, 1, noise.shape[2], 1, 1)
    if count:
        latent[:, :, :count] = given
        latent = model.model.process_latent_out(latent)
    mask[:, :, : count if masked is None else masked] = 0
    rows, _ = case.text()
    marker = {} if marked is None else {_longcat().GIVEN_KEY: marked}
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds([[rows[:1], marker]], [[rows[1:], marker]])
    guider.set_cfg(version.cfg)
    sampler = comfy.samplers.ksampler("euler")
    with torch.inference_mode():
        out = guider.sample(
            noise, latent, sampler, sigmas(version), denoise_mask=mask, disable_pbar=True, callback=callback, seed=seed
        )
    return model.model.process_latent_in(out)

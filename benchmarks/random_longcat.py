"""LongCat-Video with random weights, through the pack's own builder: for speed and memory, not for pictures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .bare_pack import bare_module
from .host import start_host
from .random_wan import WanShape, random_weights
from .variants import Variant, host_attention, host_on_cudnn

# The model's width in 4 of its 48 layers. 24 latent frames are a segment, 19 of them (73 frames) given and cached.
LONGCAT = WanShape("longcat-4-layers", 4096, 11008, 32, 4, 4096, 512, 24, 60, 104, window=19)
SMALL = WanShape("small-longcat", 256, 768, 2, 2, 64, 16, 10, 8, 8, window=5)
CFG = 4.0


def variants(gpu: bool) -> Iterator[Variant]:
    """Native keeps the given frames in BF16 on the GPU; offloaded, on the CPU, each layer copied when it attends."""
    yield Variant("native")
    if gpu:
        yield Variant("native", "cudnn", around=host_on_cudnn)
    yield Variant("off", "offloaded", {"cache_device": "cpu"})
    yield Variant("quantwm")
    if gpu:
        yield Variant("quantwm", "host attention", around=host_attention)
    yield Variant("quantwm-paper", "published", {"centroids": 256, "rank": 8}, once=True)
    yield Variant("rtn", once=True)


def load(shape: WanShape, device: torch.device) -> Any:
    """MODEL of this shape; values are drawn on `device` from a fixed seed."""
    start_host()
    import comfy.ops

    network = bare_module("world_models.longcat.network").LongCatModel(
        dim=shape.dim,
        ffn_dim=shape.ffn_dim,
        num_heads=shape.heads,
        num_layers=shape.layers,
        text_dim=shape.text_dim,
        device="meta",
        dtype=torch.bfloat16,
        operations=comfy.ops.disable_weight_init,
    )
    weights = random_weights(network, device)
    return bare_module("world_models.longcat").build(weights, {}, shape.name, {})


def sample(model: Any, shape: WanShape, block: int, steps: int, seed: int = 0) -> torch.Tensor:
    """Latent `[1, 16, frames, height, width]` of one guided continuation with the host's own guider and Euler sampler.

    block: latent frames that are made; the others are given.
    """
    import comfy.samplers

    given = shape.frames - block
    size = (1, 16, shape.frames, shape.height, shape.width)
    latent = torch.randn(size, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(1, 1, shape.frames, 1, 1)
    mask[:, :, :given] = 0
    prompts = torch.randn(2, shape.text_tokens, shape.text_dim, generator=torch.Generator().manual_seed(1))
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds([[prompts[:1], {}]], [[prompts[1:], {}]])
    guider.set_cfg(CFG)
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    sigmas = bare_module("world_models.longcat").sigmas(steps, model.get_model_object("model_sampling").shift)
    sampler = comfy.samplers.ksampler("euler")
    with torch.inference_mode():
        return guider.sample(noise, latent, sampler, sigmas, denoise_mask=mask, disable_pbar=True, seed=seed)

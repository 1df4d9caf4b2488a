"""Causal Wan models with random weights, through the host's own loader: for speed and memory, not for pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from .host import start_host


@dataclass(frozen=True)
class WanShape:
    """A checkpoint's shape and the run it is measured on: a latent grid of `frames` x `height` x `width`.

    window: most latent frames that the cache ever holds, where the model rolls it (0: all of them).
    """

    name: str
    dim: int
    ffn_dim: int
    heads: int
    layers: int
    text_dim: int
    text_tokens: int
    frames: int
    height: int
    width: int
    window: int = 0

    @property
    def video_frames(self) -> int:
        """Frames of the decoded video: four to a latent, one for the first."""
        return 4 * (self.frames - 1) + 1


CAUSAL_FORCING = WanShape("causal-forcing", 1536, 8960, 12, 30, 4096, 512, 24, 60, 104)
SMALL = WanShape("small", 256, 512, 2, 2, 64, 16, 6, 8, 8)


def load(shape: WanShape, device: torch.device) -> Any:
    """MODEL of this shape; values are drawn on `device` from a fixed seed."""
    start_host()
    import comfy.ldm.wan.ar_model
    import comfy.ops
    import comfy.sd

    network = comfy.ldm.wan.ar_model.CausalWanModel(
        model_type="t2v",
        dim=shape.dim,
        ffn_dim=shape.ffn_dim,
        num_heads=shape.heads,
        num_layers=shape.layers,
        text_dim=shape.text_dim,
        freq_dim=256,
        device="meta",
        dtype=torch.bfloat16,
        operations=comfy.ops.disable_weight_init,
    )
    return comfy.sd.load_diffusion_model_state_dict(random_weights(network, device), metadata=metadata(shape))


def random_weights(network: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """bf16 weights on the CPU for a network on the meta device, drawn on `device` from a fixed seed."""
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, value in network.state_dict().items():
        noise = torch.randn(value.shape, generator=generator, device=device) * 0.03
        weights[name] = (noise + 1 if "norm" in name and name.endswith("weight") else noise).bfloat16().cpu()
    return weights


def metadata(shape: WanShape) -> dict[str, str]:
    """What a causal checkpoint of this shape says of itself."""
    config = {"transformer": {"causal_ar": True, "num_heads": shape.heads, "text_dim": shape.text_dim}}
    return {"config": json.dumps(config)}


def sample(model: Any, shape: WanShape, block: int, steps: int, seed: int = 0) -> torch.Tensor:
    """Latent `[1, 16, frames, height, width]` of one text-to-video run with the host's own guider and sampler."""
    import comfy.samplers

    context = torch.randn(1, shape.text_tokens, shape.text_dim, generator=torch.Generator().manual_seed(1))
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds([[context, {}]], [[context, {}]])
    guider.set_cfg(1.0)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
    size = (1, 16, shape.frames, shape.height, shape.width)
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    sampler = comfy.samplers.ksampler("ar_video", {"num_frame_per_block": block})
    with torch.inference_mode():
        return guider.sample(noise, torch.zeros(size), sampler, sigmas, disable_pbar=True, seed=seed)

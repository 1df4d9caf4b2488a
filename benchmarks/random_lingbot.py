"""LingBot-World with random weights, through the pack's own loader: for speed and memory, not for pictures."""

from __future__ import annotations

from typing import Any

import torch

from .bare_pack import bare_module
from .host import start_host
from .random_wan import WanShape, metadata, random_weights

RELEASE = "v2 causal-fast"
# 48 latent frames are 12 blocks of 4; the window is full from the fifth on.
LINGBOT = WanShape("lingbot-v2-1.3b", 1536, 8960, 12, 30, 4096, 512, 48, 60, 104, window=18)
SMALL = WanShape("small-lingbot", 256, 512, 2, 2, 64, 16, 24, 8, 8, window=18)


def load(shape: WanShape, device: torch.device) -> Any:
    """MODEL of this shape; values are drawn on `device` from a fixed seed."""
    start_host()
    import comfy.ops

    network = bare_module("world_models.lingbot.network").LingBotModel(
        in_dim=36,
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
    for name in weights:
        # In a trained model these begin at zero; at full size they would multiply the stream in every block.
        if "cam_" in name:
            weights[name] *= 0.02
    return bare_module("world_models.lingbot").build(weights, metadata(shape), {})


def sample(model: Any, shape: WanShape, block: int, steps: int, seed: int = 0) -> torch.Tensor:
    """Latent `[1, 16, frames, height, width]` of one run along a walk, with the host's own guider and sampler.

    The published noise levels are used: `steps` has to be their number.
    """
    import comfy.samplers

    lingbot, paths = bare_module("world_models.lingbot"), bare_module("world_models.lingbot.paths")
    release = lingbot.RELEASES[RELEASE]
    sigmas = torch.tensor(release.sigmas())
    if steps != len(sigmas) - 1:
        raise ValueError(f"LingBot-World is sampled in {len(sigmas) - 1} steps; got {steps}.")
    camera = lingbot.CameraPath(paths.walk(shape.video_frames, 2.0, 90.0), (416.0, 416.0, 416.0, 240.0))
    size = (1, 16, shape.frames, shape.height, shape.width)
    mask = torch.ones(1, 1, *size[2:])
    mask[:, :, 0] = 0
    settings = {
        "concat_latent_image": torch.randn(size, generator=torch.Generator().manual_seed(2)),
        "concat_mask": mask,
        lingbot.CAMERA_KEY: lingbot.latent_camera(camera, shape.video_frames, shape.frames),
        lingbot.WINDOW_KEY: lingbot.AttentionWindow(release.window, release.sink),
    }
    context = torch.randn(1, shape.text_tokens, shape.text_dim, generator=torch.Generator().manual_seed(1))
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds([[context, settings]], [[context, settings]])
    guider.set_cfg(1.0)
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    sampler = comfy.samplers.ksampler("ar_video", {"num_frame_per_block": block})
    with torch.inference_mode():
        return guider.sample(noise, torch.zeros(size), sampler, sigmas, disable_pbar=True, seed=seed)

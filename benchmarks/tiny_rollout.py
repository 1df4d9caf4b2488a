"""Roll out many tiny worlds at once through the real host's sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .host import load_pack, start_host

SIGMA_STEPS = 4
BLOCK_FRAMES = 3


@dataclass
class Worlds:
    """A batch of worlds: model, codec, conditioning `[N, 4, 64]`, seed latents and true frames `[N, T, H, W, 3]`."""

    model: Any
    vae: Any
    context: torch.Tensor
    noise_shape: tuple[int, ...]
    true_frames: torch.Tensor
    seed_frames: int
    motions: list[tuple[float, float, float]]

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """Generated frames only, `[N, T - seed, H, W, 3]` in 0..1."""
        frames = [self.vae.decode(one.unsqueeze(0)).flatten(0, -4) for one in latent[:, :, self.seed_frames :]]
        return torch.stack(frames).clamp(0, 1)


def prepare(world_seeds: list[int], seed_frames: int = 21, length: int = 36) -> Worlds:
    """The embedded model with the first `seed_frames` true frames of each world given to it.

    The camera turns by 18 or 20 degrees a frame, so a turn takes a whole number of frames and every generated frame
    has the same true view as one the model was given: what it misses, it forgot.
    """
    start_host()
    pack = load_pack()
    import comfy.sd

    tiny_world = pack.world_models.tiny_world
    vae = tiny_world.load_codec_vae()
    model = comfy.sd.load_diffusion_model(str(tiny_world.WORLD_FILE)).clone()
    contexts, latents, truths, motions = [], [], [], []
    for seed in world_seeds:
        draw = torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist()
        turn = (18.0 if draw[0] < 0.5 else 20.0) * (1 if seed % 2 else -1)
        motion = (turn, 0.35 * draw[1], 360 * draw[2])
        frames = tiny_world.render(seed, *motion, length)
        contexts.append(tiny_world.conditioning(*motion))
        latents.append(vae.encode(frames[: max(seed_frames, 1)]))
        truths.append(frames)
        motions.append(motion)
    options = model.model_options.setdefault("transformer_options", {})
    initial = torch.cat([_as_video(latent) for latent in latents])
    if seed_frames:
        options["ar_config"] = {"initial_latent": initial}
    shape = (len(world_seeds), initial.shape[1], length, *initial.shape[3:])
    return Worlds(model, vae, torch.cat(contexts), shape, torch.stack(truths), seed_frames, motions)


def sample(
    worlds: Worlds, model: Any, seed: int, block: int = BLOCK_FRAMES, sampler: Any | None = None
) -> torch.Tensor:
    """Latent `[N, 16, T, h, w]` of one rollout of every world, with the host's own guider and sampler, or another.

    The prompt says how the camera of the first world moves, for samplers that remember by it.
    """
    import comfy.samplers

    guider = comfy.samplers.CFGGuider(model)
    prompt = [[worlds.context, {"camera_motion": worlds.motions[0]}]]
    guider.set_conds(prompt, prompt)
    guider.set_cfg(1.0)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", SIGMA_STEPS)
    noise = torch.randn(worlds.noise_shape, generator=torch.Generator().manual_seed(seed))
    sampler = sampler or comfy.samplers.ksampler("ar_video", {"num_frame_per_block": block})
    latent = torch.zeros(worlds.noise_shape)
    with torch.inference_mode():
        return guider.sample(noise, latent, sampler, sigmas, disable_pbar=True, seed=seed)


def _as_video(latent: torch.Tensor) -> torch.Tensor:
    """A codec latent as `[1, 16, T, h, w]`, whichever way the codec lays out time."""
    return latent if latent.ndim == 5 else latent.transpose(0, 1).unsqueeze(0)

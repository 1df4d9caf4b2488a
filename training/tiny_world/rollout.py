"""Rollouts in the real host: its loader, its sampler, our VAE, many worlds in one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from .pack import conditioning, render, tiny_world

import comfy.sample  # isort: skip
import comfy.samplers  # isort: skip
import comfy.sd  # isort: skip

STEPS = 4


@dataclass(frozen=True)
class Worlds:
    """A set of test worlds with their true frames [N, T, H, W, 3]."""

    rooms: render.Rooms
    motion: render.Motion
    frames: Tensor


@lru_cache(maxsize=1)
def make_worlds(count: int, frames: int, seed: int, slowest: float) -> Worlds:
    """Test worlds that no training step has seen; the camera turns by `slowest` degrees a frame or more."""
    generator = torch.Generator().manual_seed(seed)
    rooms, motion = render.random_rooms(count, generator), render.random_motion(count, generator)
    low, high = render.TURN_RATE_RANGE
    speed = slowest + (motion.turn_rate.abs() - low) * (high - slowest) / (high - low)
    motion = render.Motion(motion.turn_rate.sign() * speed, motion.orbit, motion.phase)
    return Worlds(rooms, motion, render.render_clips(rooms, motion, frames).movedim(2, -1).contiguous())


class Rollout:
    """A world model and a codec, loaded the way a graph loads them."""

    def __init__(self, world_file: Path, codec_file: Path) -> None:
        self.model = comfy.sd.load_diffusion_model(str(world_file))
        self.vae = tiny_world.codec.load_codec_vae(codec_file)

    @torch.no_grad()
    def reconstruct(self, frames: Tensor) -> Tensor:
        """Frames [N, T, H, W, 3] through the codec and back."""
        return torch.cat([self.vae.decode(self.vae.encode(clip)) for clip in frames])

    @torch.no_grad()
    def __call__(
        self, worlds: Worlds, seed_frames: int, block: int = 3, seed: int = 0, prepare: Callable | None = None
    ) -> Tensor:
        """Frames [N, T, H, W, 3] of which the first `seed_frames` were given and the rest generated.

        `prepare(model)` may patch the clone that is sampled.
        """
        latents = torch.cat([self.vae.encode(clip[:seed_frames]) for clip in worlds.frames])
        model = self.model.clone()
        model.model_options["transformer_options"] = {"ar_config": {"initial_latent": latents}}
        if prepare is not None:
            prepare(model)
        empty = latents.new_zeros(*latents.shape[:2], worlds.frames.shape[1], *latents.shape[3:])
        sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", STEPS)
        context = [[conditioning.context_tokens(worlds.motion), {}]]
        guider = comfy.samplers.CFGGuider(model)
        guider.set_conds(context, context)
        guider.set_cfg(1.0)
        sampler = comfy.samplers.ksampler("ar_video", {"num_frame_per_block": block})
        noise = comfy.sample.prepare_noise(empty, seed)
        output = guider.sample(noise, empty, sampler, sigmas, disable_pbar=True, seed=seed)
        return torch.cat([self.vae.decode(one[None]) for one in output])

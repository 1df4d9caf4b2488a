"""Tiny World Seed: the true first frames of a world, as the start of a generated video."""

from __future__ import annotations

import comfy.model_management
import torch
from comfy_api.latest import io

from ..world_models import tiny_world
from .sockets import CATEGORY
from .tiny_world_conditioning import motion_error, motion_inputs

_LATENT_SIZE = (tiny_world.HEIGHT // tiny_world.DOWNSCALE, tiny_world.WIDTH // tiny_world.DOWNSCALE)


class TinyWorldSeed(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMTinyWorldSeed",
            display_name="Tiny World Seed",
            category=CATEGORY,
            description=(
                "Renders a world of the tiny world and lets the model see its first frames; the sampler "
                "continues from there. After a full turn the generated frames show walls that were seen "
                "before, so the true frames tell how well the model's cache remembers."
            ),
            search_aliases=[
                "quantwm",
                "tiny world",
                "start image",
                "image to video",
                "ar video i2v",
                "seed frames",
            ],
            inputs=_inputs(),
            outputs=[
                io.Model.Output("seeded_model", display_name="MODEL", tooltip="The model with its first frames given."),
                io.Latent.Output(
                    "latent", display_name="LATENT", tooltip="Empty latent of the right size for the sampler."
                ),
                io.Image.Output(
                    "true_frames",
                    display_name="true frames",
                    tooltip="What the camera really sees in every frame.",
                ),
            ],
        )

    @classmethod
    def validate_inputs(
        cls,
        turn_rate: float | None = None,
        orbit: float | None = None,
        seed_frames: int | None = None,
        length: int | None = None,
    ) -> bool | str:
        if seed_frames is not None and length is not None and (error := _seed_error(seed_frames, length)):
            return error
        return motion_error(turn_rate, orbit)

    @classmethod
    def execute(
        cls,
        model,
        vae,
        world_seed: int,
        turn_rate: float,
        orbit: float,
        orbit_phase: float,
        seed_frames: int,
        length: int,
    ) -> io.NodeOutput:
        tiny_world.check_motion(turn_rate, orbit)
        if error := _seed_error(seed_frames, length):
            raise ValueError(error)
        frames = tiny_world.render(world_seed, turn_rate, orbit, orbit_phase, length)
        seed = vae.encode(frames[:seed_frames])
        _check_latent(seed, seed_frames)
        latent = torch.zeros(
            (1, tiny_world.LATENT_CHANNELS, length, *_LATENT_SIZE),
            device=comfy.model_management.intermediate_device(),
        )
        return io.NodeOutput(_with_initial_latent(model, seed), {"samples": latent}, frames)


def _inputs() -> list[io.Input]:
    return [
        io.Model.Input("model", tooltip="The built-in tiny world from Load World Model, before or after Apply."),
        io.Vae.Input("vae", tooltip="From Tiny World VAE. No other VAE fits."),
        io.Int.Input(
            "world_seed",
            default=0,
            min=0,
            max=0xFFFFFFFF,
            tooltip="Which world: wall paintings, pillars, where the camera stands. Any number is a world.",
        ),
        *motion_inputs(),
        io.Int.Input(
            "seed_frames",
            default=21,
            min=1,
            max=255,
            tooltip=(
                "How many true frames the model is given before it goes on alone; at least 1, fewer than "
                "length. 21 (default) is a little more than a full turn at 18 degrees a frame: every later "
                "view has been seen. With fewer, the model has to invent the walls it has not seen."
            ),
        ),
        io.Int.Input(
            "length",
            default=36,
            min=2,
            max=256,
            tooltip=(
                "Frames of the whole video, seed frames included. 36 (default) is the length that the model "
                "was trained on; longer videos work and drift more."
            ),
        ),
    ]


def _seed_error(seed_frames: int, length: int) -> str | None:
    """Why these numbers do not leave the model anything to do, or None."""
    if 1 <= seed_frames < length:
        return None
    return (
        f"seed_frames must be at least 1 and smaller than length, got seed_frames {seed_frames} and "
        f"length {length}. Lower seed_frames, or raise length above it."
    )


def _check_latent(latent: torch.Tensor, frames: int) -> None:
    """Raise ValueError unless the VAE made what the tiny world's model was trained on."""
    expected = (1, tiny_world.LATENT_CHANNELS, frames, *_LATENT_SIZE)
    if tuple(latent.shape) != expected:
        raise ValueError(
            f"vae must turn {frames} frames into a latent of shape {list(expected)}, got "
            f"{list(latent.shape)}. Connect the VAE of the node Tiny World VAE."
        )


def _with_initial_latent(model, latent: torch.Tensor):
    """A clone of the model that the autoregressive sampler starts from `latent`, as ARVideoI2V sets it."""
    seeded = model.clone()
    options = seeded.model_options.setdefault("transformer_options", {})
    options["ar_config"] = {**options.get("ar_config", {}), "initial_latent": latent}
    return seeded

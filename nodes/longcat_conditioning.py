"""LongCat Conditioning: prompts, given frames and an empty rest, for one segment of a LongCat-Video."""

from __future__ import annotations

import comfy.model_management
import comfy.utils
import node_helpers
import torch
from comfy_api.latest import io

from ..world_models import longcat
from .sockets import CATEGORY

SIZE_STEP = 16
FRAMES_PER_LATENT = 4
LATENT_CHANNELS, LATENT_PIXELS = 16, 8
DEFAULT_LENGTH, DEFAULT_GIVEN = 93, 13


class QuantWMLongCatConditioning(io.ComfyNode):
    """Given frames stand at the start of the latent, behind a noise mask that keeps them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMLongCatConditioning",
            display_name="LongCat Conditioning",
            category=CATEGORY,
            description=(
                "Prepares one segment of a LongCat-Video: from text alone, from a start image, or as the continuation "
                "of a video whose last frames are cached. Chain several to make a video of any length."
            ),
            search_aliases=[
                "quantwm",
                "longcat",
                "video continuation",
                "long video",
                "image to video",
                "text to video",
                "extend video",
            ],
            inputs=_inputs(),
            outputs=[
                io.Conditioning.Output("positive", display_name="positive", tooltip="For the guider."),
                io.Conditioning.Output("negative", display_name="negative", tooltip="For the guider."),
                io.Latent.Output(
                    "latent", display_name="latent", tooltip="Given frames, and an empty rest, for the sampler."
                ),
                io.Int.Output(
                    "overlap",
                    display_name="overlap",
                    tooltip=(
                        "How many frames of the result are the given ones again: batch_index of Get Image from Batch, "
                        "to cut them off."
                    ),
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, width=None, height=None, length=None, given_frames=None) -> bool | str:
        # Inputs named here lose ComfyUI's own check of their range, so all is checked; None is linked.
        try:
            _check_size(width, height)
            _check_counts(length, given_frames)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        positive,
        negative,
        vae,
        width: int,
        height: int,
        length: int,
        given_frames: int,
        start_image: torch.Tensor | None = None,
        video: torch.Tensor | None = None,
    ) -> io.NodeOutput:
        _check_size(width, height)
        _check_counts(length, given_frames)
        frames = _given(start_image, video, given_frames)
        if frames is not None and len(frames) >= length:
            raise ValueError(
                f"given frames must be fewer than length, or nothing is left to make; got {len(frames)} of {length}. "
                "Raise length, or lower given_frames."
            )
        latent = torch.zeros(
            (1, LATENT_CHANNELS, _latents(length), height // LATENT_PIXELS, width // LATENT_PIXELS),
            device=comfy.model_management.intermediate_device(),
        )
        count = 0 if frames is None else _latents(len(frames))
        samples = {"samples": latent}
        if frames is not None:
            latent[:, :, :count] = _encoded(vae, frames, width, height)
            mask = torch.ones((1, 1, latent.shape[2], 1, 1), device=latent.device)
            mask[:, :, :count] = 0
            # As large as the latent: other nodes scale it as a picture.
            samples["noise_mask"] = mask.expand(-1, -1, -1, *latent.shape[3:]).contiguous()
        marked = [
            node_helpers.conditioning_set_values(prompt, {longcat.GIVEN_KEY: count}) for prompt in (positive, negative)
        ]
        return io.NodeOutput(*marked, samples, 0 if frames is None else len(frames))


def _inputs() -> list[io.Input]:
    return [
        io.Conditioning.Input("positive", tooltip="The prompt, from CLIP Text Encode with umT5-XXL (type wan)."),
        io.Conditioning.Input("negative", tooltip="What not to show. Without effect at cfg 1."),
        io.Vae.Input("vae", tooltip="The Wan 2.1 VAE."),
        io.Int.Input(
            "width",
            default=832,
            min=SIZE_STEP,
            max=4096,
            step=SIZE_STEP,
            tooltip="Width of the video in pixels, a multiple of 16 (default 832). Given frames are cropped to fit.",
        ),
        io.Int.Input(
            "height",
            default=480,
            min=SIZE_STEP,
            max=4096,
            step=SIZE_STEP,
            tooltip="Height of the video in pixels, a multiple of 16 (default 480).",
        ),
        io.Int.Input(
            "length",
            default=DEFAULT_LENGTH,
            min=1,
            max=4093,
            step=FRAMES_PER_LATENT,
            tooltip=(
                "Frames of the segment, the given ones included: 4 n + 1. 93 (default) is what the model was trained "
                "for, 6 seconds at 15 frames a second."
            ),
        ),
        io.Int.Input(
            "given_frames",
            default=DEFAULT_GIVEN,
            min=1,
            max=4089,
            step=FRAMES_PER_LATENT,
            tooltip=(
                "How many of the last frames of video are continued: 4 n + 1. 13 (default) as published; 73 remembers "
                "more, and its cache is where 2 bits pay most. A start image always counts as 1."
            ),
        ),
        io.Image.Input(
            "start_image",
            optional=True,
            tooltip="The first frame. Leave it out to continue a video, or for text alone.",
        ),
        io.Image.Input(
            "video", optional=True, tooltip="Frames to continue, at 15 a second: the segment before, or a loaded video."
        ),
    ]


def _check_size(width: int | None, height: int | None) -> None:
    for name, value in (("width", width), ("height", height)):
        if value is not None and (value % SIZE_STEP or not SIZE_STEP <= value <= 4096):
            near = max(SIZE_STEP, round(value / SIZE_STEP) * SIZE_STEP)
            raise ValueError(f"{name} must be a multiple of {SIZE_STEP} up to 4096; got {value}. Set it to {near}.")


def _check_counts(length: int | None, given: int | None) -> None:
    for name, value in (("length", length), ("given_frames", given)):
        if value is not None and (value < 1 or value % FRAMES_PER_LATENT != 1):
            near = max(0, round((value - 1) / FRAMES_PER_LATENT)) * FRAMES_PER_LATENT + 1
            raise ValueError(f"{name} must be 4 n + 1 (1, 5, 9, ...); got {value}. Set it to {near}.")


def _given(start_image: torch.Tensor | None, video: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """Frames `[N, H, W, C]` that are given, or None for none."""
    if start_image is not None and video is not None:
        raise ValueError(
            "a segment begins with a start image or continues a video; got both. Disconnect start_image or video."
        )
    if video is None:
        return None if start_image is None else start_image[:1]
    if len(video) < count:
        usable = (len(video) - 1) // FRAMES_PER_LATENT * FRAMES_PER_LATENT + 1
        raise ValueError(
            f"video has {len(video)} frames, but given_frames asks for the last {count}. Lower given_frames to {usable}"
            " or give more frames."
        )
    return video[-count:]


def _latents(frames: int) -> int:
    return (frames - 1) // FRAMES_PER_LATENT + 1


def _encoded(vae, frames: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """Latent `[1, 16, n, H, W]` of frames, cropped to the video's shape."""
    pixels = comfy.utils.common_upscale(frames[..., :3].movedim(-1, 1), width, height, "bilinear", "center")
    encoded = vae.encode(pixels.movedim(1, -1))
    expected = (1, LATENT_CHANNELS, _latents(len(frames)), height // LATENT_PIXELS, width // LATENT_PIXELS)
    if tuple(encoded.shape) != expected:
        raise ValueError(
            f"vae must turn {len(frames)} frames into a latent of shape {list(expected)}; this one gives "
            f"{list(encoded.shape)}. Load the Wan 2.1 VAE."
        )
    return encoded

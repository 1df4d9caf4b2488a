"""LingBot Conditioning: start picture, camera and schedule of an image-to-world run."""

from __future__ import annotations

import comfy.model_management
import node_helpers
import torch
from comfy_api.latest import io

from ..world_models import lingbot
from .sockets import CATEGORY, CameraSocket

AUTOMATIC, EVERYTHING = -1, 0
SIZE_STEP = 16
# What the published code's own rounding of sizes distorts at most, and a little more.
ASPECT_TOLERANCE = 0.04
LATENT_CHANNELS, LATENT_PIXELS = 16, 8


class QuantWMLingBotConditioning(io.ComfyNode):
    """Joins text, picture and camera for LingBot-World, and gives the latent and noise levels that fit them.

    Cameras are OpenCV camera-to-world poses (see Camera Path). The model is told the motion from each latent frame to
    the next, in that frame's own axes, translations divided by the longest of the clip.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMLingBotConditioning",
            display_name="LingBot Conditioning",
            category=CATEGORY,
            description=(
                "Prepares an image-to-world run of LingBot-World: the start picture, the camera path, and the few "
                "noise levels that the model was distilled on. The video is as long as the camera path."
            ),
            search_aliases=["quantwm", "lingbot", "image to world", "camera control", "image to video", "world model"],
            inputs=_inputs(),
            outputs=[
                io.Conditioning.Output("positive", display_name="positive", tooltip="For the guider."),
                io.Latent.Output("latent", display_name="latent", tooltip="Empty latent of the right size."),
                io.Sigmas.Output("sigmas", display_name="sigmas", tooltip="The noise levels of this version."),
                io.Int.Output(
                    "block",
                    display_name="block",
                    tooltip="Latent frames a block, for the sampler: 4 for v2, 3 for v1.",
                ),
                io.Conditioning.Output(
                    "negative",
                    display_name="negative",
                    tooltip="For CFG Guider (v2 causal-pretrain, cfg 5): the negative prompt, same picture and camera.",
                ),
            ],
        )

    @classmethod
    def execute(
        cls,
        positive,
        vae,
        start_image,
        camera,
        version: str,
        width: int,
        height: int,
        window: int,
        sink: int,
        negative=None,
    ) -> io.NodeOutput:
        release = lingbot.RELEASES[version]
        frames = release.usable_frames(len(camera))
        latents = release.latents(len(camera))
        check_aspect(start_image, width, height)
        picture = _encoded(vae, start_image, latents, width, height)
        mask = torch.ones(1, 1, latents, *picture.shape[-2:])
        mask[:, :, 0] = 0
        values = {
            "concat_latent_image": picture,
            "concat_mask": mask,
            lingbot.CAMERA_KEY: lingbot.latent_camera(camera, frames, latents),
            lingbot.WINDOW_KEY: _window(release, window, sink),
            lingbot.SOLVER_KEY: release.solver,
        }
        latent = torch.zeros(
            (1, LATENT_CHANNELS, latents, height // LATENT_PIXELS, width // LATENT_PIXELS),
            device=comfy.model_management.intermediate_device(),
        )
        prompts = [
            node_helpers.conditioning_set_values(prompt, values)
            for prompt in (positive, _silent(positive) if negative is None else negative)
        ]
        return io.NodeOutput(prompts[0], {"samples": latent}, torch.tensor(release.sigmas()), release.block, prompts[1])


def _silent(prompt: list) -> list:
    """A prompt that says nothing: zeros, which are what the model sees behind the end of every text."""
    return [[torch.zeros_like(text), {**options}] for text, options in prompt]


def _inputs() -> list[io.Input]:
    return [
        io.Conditioning.Input("positive", tooltip="The prompt, from CLIP Text Encode with umT5-XXL (type wan)."),
        io.Vae.Input("vae", tooltip="The Wan 2.1 VAE."),
        io.Image.Input(
            "start_image",
            tooltip="The first frame of the world. Its aspect has to be that of width and height; crop it before.",
        ),
        CameraSocket.Input("camera", tooltip="From Camera Path. Its length is the length of the video."),
        io.Combo.Input(
            "version",
            options=list(lingbot.RELEASES),
            default=next(iter(lingbot.RELEASES)),
            tooltip=(
                "Which checkpoint is sampled.\n"
                "v2 causal-fast (default): 14B or 1.3B, blocks of 4, a window of 18 with a sink of 6.\n"
                "v1 fast: blocks of 3, no window.\n"
                "v2 causal-pretrain: not distilled. 40 steps, no window; World Sampler, and cfg 5 in CFG Guider with "
                "the negative output."
            ),
        ),
        io.Int.Input(
            "width",
            default=832,
            min=SIZE_STEP,
            max=4096,
            step=SIZE_STEP,
            tooltip="Width of the video in pixels, a multiple of 16. 832 (default) x 480 is what the model likes best.",
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
            "window",
            default=AUTOMATIC,
            min=AUTOMATIC,
            max=4096,
            advanced=True,
            tooltip=(
                "How many latent frames a block looks at, itself and the sink included. -1 (default): as the version "
                "was made for (18 for v2, everything for v1). 0: everything, so the cache grows with the video. World "
                "Sampler's own window has to be 0."
            ),
        ),
        io.Int.Input(
            "sink",
            default=AUTOMATIC,
            min=AUTOMATIC,
            max=4096,
            advanced=True,
            tooltip=(
                "How many of the very first latent frames always stay in the window. -1 (default): as the version was "
                "made for (6 for v2)."
            ),
        ),
        io.Conditioning.Input(
            "negative",
            optional=True,
            tooltip=(
                "What is not to be seen, for v2 causal-pretrain with cfg 5. Left open, the negative output is an empty "
                "prompt. Distilled versions are sampled with cfg 1, which reads no negative prompt."
            ),
        ),
    ]


def check_aspect(image: torch.Tensor, width: int, height: int) -> None:
    """Raise ValueError when a picture `[N, H, W, C]` would be visibly stretched."""
    image_height, image_width = image.shape[1:3]
    ours, theirs = width / height, image_width / image_height
    if abs(theirs / ours - 1) <= ASPECT_TOLERANCE:
        return
    fitting = lingbot.size_for(image_width, image_height, width * height)
    raise ValueError(
        f"start_image is {image_width} x {image_height} (aspect {theirs:.2f}) and the video {width} x {height} "
        f"({ours:.2f}): it would be stretched. Crop the picture to {ours:.2f}, or set width and height to its aspect, "
        f"such as {fitting[0]} x {fitting[1]}."
    )


def _window(release: lingbot.Release, size: int, sink: int) -> lingbot.AttentionWindow | None:
    size = release.window if size == AUTOMATIC else size
    sink = release.sink if sink == AUTOMATIC else sink
    if size == EVERYTHING:
        return None
    window = lingbot.AttentionWindow(size, sink)
    window.check_block(release.block)
    return window


def _encoded(vae, image: torch.Tensor, latents: int, width: int, height: int) -> torch.Tensor:
    """Latent `[1, 16, latents, H, W]` of the picture followed by grey frames, as the model was trained."""
    pixels = image[:1, :, :, :3].movedim(-1, 1)
    pixels = torch.nn.functional.interpolate(pixels, size=(height, width), mode="bicubic").movedim(1, -1)
    video = pixels.new_full((lingbot.FRAMES_PER_LATENT * (latents - 1) + 1, height, width, 3), 0.5)
    video[:1] = pixels
    encoded = vae.encode(video)
    expected = (1, LATENT_CHANNELS, latents, height // LATENT_PIXELS, width // LATENT_PIXELS)
    if tuple(encoded.shape) != expected:
        raise ValueError(
            f"vae must turn {len(video)} frames into a latent of shape {list(expected)}; this one gives "
            f"{list(encoded.shape)}. Load the Wan 2.1 VAE."
        )
    return encoded

"""Tiny World VAE: the embedded world's picture codec, for the stock VAE nodes."""

from __future__ import annotations

from comfy_api.latest import io

from ..world_models import tiny_world
from .sockets import CATEGORY


class TinyWorldVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMTinyWorldVAE",
            display_name="Tiny World VAE",
            category=CATEGORY,
            description=(
                "The picture codec of the tiny world that comes with this pack: 192 x 128 pixels, one latent "
                "frame per video frame. Use it with VAE Decode and Tiny World Seed; it fits no other model."
            ),
            search_aliases=["quantwm", "tiny world", "load vae", "codec", "autoencoder"],
            inputs=[],
            outputs=[
                io.Vae.Output("vae", display_name="VAE", tooltip="For VAE Decode, VAE Encode and Tiny World Seed.")
            ],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(tiny_world.load_codec_vae())

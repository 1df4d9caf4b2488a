"""The embedded world model: a rendered room, a codec and a model of 7 million parameters, for any machine."""

from .codec import CODEC_FILE, DOWNSCALE, LATENT_CHANNELS, WEIGHTS_DIR, load_codec, load_codec_vae
from .conditioning import check_motion, conditioning, context_tokens
from .render import HEIGHT, ORBIT_RANGE, TURN_RATE_RANGE, WIDTH, render

WORLD_FILE = WEIGHTS_DIR / "world.safetensors"
FRAMES_PER_BLOCK = 3
"""Frames a block that the model is trained for (blocks of 1 and 2 work, with a little more drift)."""

__all__ = [
    "CODEC_FILE",
    "DOWNSCALE",
    "FRAMES_PER_BLOCK",
    "HEIGHT",
    "LATENT_CHANNELS",
    "ORBIT_RANGE",
    "TURN_RATE_RANGE",
    "WEIGHTS_DIR",
    "WIDTH",
    "WORLD_FILE",
    "check_motion",
    "conditioning",
    "context_tokens",
    "load_codec",
    "load_codec_vae",
    "render",
]

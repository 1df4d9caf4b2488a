"""LingBot-World checkpoints: told by their camera layers, and refused when some of these are missing."""

from __future__ import annotations

import torch

from .camera import ACT_CHANNELS, LATENT_PIXELS, RAY_CHANNELS
from .network import CAMERA_BLOCK_LAYERS, CAMERA_LAYERS

PATCH = 4
PICTURE_CHANNELS = 36  # 16 of noise, 4 of mask, 16 of the picture


def is_lingbot(weights: dict[str, torch.Tensor]) -> bool:
    """Whether these are to be LingBot-World: any camera layer, or the picture's channels without a CLIP picture."""
    marks = (*CAMERA_LAYERS, *CAMERA_BLOCK_LAYERS)
    if any(mark in key for key in weights for mark in marks):
        return True
    patches = weights.get("patch_embedding.weight")
    return patches is not None and patches.shape[1] == PICTURE_CHANNELS and "img_emb.proj.0.bias" not in weights


def check_weights(weights: dict[str, torch.Tensor], path: str) -> None:
    """Raise ValueError unless the camera layers are complete and of the kind that camera rays fit."""
    blocks = {key.split(".")[1] for key in weights if key.startswith("blocks.")}
    layers = [*CAMERA_LAYERS, *(f"blocks.{block}.{layer}" for block in blocks for layer in CAMERA_BLOCK_LAYERS)]
    expected = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    missing = sorted(key for key in expected if key not in weights)
    if missing:
        raise ValueError(
            f"{path} looks like LingBot-World, but {len(missing)} of {len(expected)} weights of its camera layers are "
            f"missing: {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}. Get the checkpoint again with "
            "all its parts; a Wan 2.2 image-to-video model belongs into Load Diffusion Model."
        )
    if camera_channels(weights) not in (RAY_CHANNELS, ACT_CHANNELS):
        known = " or ".join(str(channels * LATENT_PIXELS**2 * PATCH) for channels in (RAY_CHANNELS, ACT_CHANNELS))
        raise ValueError(
            f"{path} takes {weights['patch_embedding_wancamctrl.weight'].shape[1]} camera numbers a token; known are "
            f"{known} (camera rays, or ray directions and keys). Use a published cam, act or causal variant."
        )
    channels = weights["patch_embedding.weight"].shape[1]
    if channels != PICTURE_CHANNELS:
        raise ValueError(
            f"{path} takes {channels} latent channels; LingBot-World's image-to-world models take {PICTURE_CHANNELS} "
            "(noise, mask and picture). Use an image-to-world checkpoint."
        )


def camera_channels(weights: dict[str, torch.Tensor]) -> float:
    """Numbers a pixel that the camera embedding takes; no whole number where it takes something else."""
    channels = weights["patch_embedding_wancamctrl.weight"].shape[1] / (LATENT_PIXELS**2 * PATCH)
    return int(channels) if channels.is_integer() else channels

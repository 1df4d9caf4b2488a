"""What a plan has to know of a causal Wan model: the shape of its cache, and the memory that is left for it."""

from __future__ import annotations

from typing import Any

import comfy.model_management

from ...quantwm_core import CacheGeometry
from ...quantwm_core.accounting import format_bytes
from ...quantwm_core.plan_table import World


def world_of(model: Any, width: int, height: int) -> World:
    """The model's cache for videos of `width` x `height` pixels."""
    network, scale = model.model.diffusion_model, model.model.latent_format
    _, patch_height, patch_width = network.patch_size
    rows, columns = height // scale.spacial_downscale_ratio, width // scale.spacial_downscale_ratio
    return World(
        CacheGeometry(len(network.blocks), network.num_heads, network.head_dim),
        frame_tokens=-(-rows // patch_height) * -(-columns // patch_width),
        frames_per_latent=scale.temporal_downscale_ratio,
        element_bytes=model.model.get_dtype_inference().itemsize,
    )


def room_for_cache(model: Any, width: int, height: int, latents: int) -> int:
    """Free bytes of the model's device, less weights that are still to be loaded and what the host plans for a block.

    Raises:
        ValueError: when nothing is left.
    """
    format_, device = model.model.latent_format, model.load_device
    scale = format_.spacial_downscale_ratio
    free = comfy.model_management.get_free_memory(device)
    # On the CPU weights lie where they are used.
    weights = 0 if device.type == "cpu" else max(0, model.model_size() - model.loaded_size())
    shape = [1, format_.latent_channels, latents, height // scale, width // scale]
    forward = round(model.model.memory_required(shape))
    room = free - weights - forward
    if room <= 0:
        raise ValueError(
            f"budget 0 takes the free memory of {device}, and {format_bytes(free)} are free where weights still need "
            f"{format_bytes(weights)} and a forward {format_bytes(forward)}. Set budget, or free memory first."
        )
    return room

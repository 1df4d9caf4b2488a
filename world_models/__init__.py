"""One folder a world model: how a packed cache is attached to it, and the model itself where ComfyUI has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..quantwm_core import CacheHandle, CacheSettings
from ..quantwm_core.methods import Method
from ..quantwm_core.plan_table import World
from ..quantwm_core.probe import LogitProbe
from . import causal_wan, longcat

ADAPTERS = (causal_wan, longcat)


def attach(
    model: Any,
    settings: CacheSettings,
    on_block: Callable[[dict], None] | None = None,
    method: Method | None = None,
    probe: LogitProbe | None = None,
) -> tuple[Any, CacheHandle]:
    """A clone of `model` whose sampling runs keep their KV cache as `settings` say, and the handle of its runs.

    Args:
        model: ComfyUI MODEL of an autoregressive world model.
        on_block: called with a history entry after each committed block.
        method: overrides the method that `settings` name (ablations).
        probe: compares packed and true keys during the run (evaluation).

    Raises:
        ValueError: when no adapter knows the model.
    """
    return _adapter_of(model).attach(model, settings, on_block, method, probe)


def world_of(model: Any, width: int, height: int) -> World:
    """What a plan has to know: the shape of the model's cache for videos of `width` x `height` pixels.

    Raises:
        ValueError: when no adapter knows the model.
    """
    return _adapter_of(model).world_of(model, width, height)


def room_for_cache(model: Any, width: int, height: int, latents: int) -> int:
    """Bytes that the model's device has free beside the model and the forward of a block of `latents` latent frames.

    Raises:
        ValueError: when no adapter knows the model, or when nothing is left.
    """
    return _adapter_of(model).room_for_cache(model, width, height, latents)


def _adapter_of(model: Any) -> Any:
    for adapter in ADAPTERS:
        if adapter.supports(model):
            return adapter
    known = ", ".join(adapter.MODELS for adapter in ADAPTERS)
    network = type(getattr(model.model, "diffusion_model", None)).__name__
    raise ValueError(
        f"QuantWM needs an autoregressive world model with a KV cache ({known}); this is "
        f"{type(model.model).__name__} with a {network}. If the checkpoint is one of them, load it with Load World "
        "Model: without causal metadata ComfyUI takes it for an ordinary video model."
    )

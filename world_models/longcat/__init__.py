"""LongCat-Video: videos, and their continuation from frames that are given and cached. The host has no such model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...quantwm_core.plan_table import World
from ..causal_wan import shape
from ..causal_wan.shape import room_for_cache
from .adapter import attach, supports
from .checkpoint import is_longcat
from .lora import with_lora
from .model import GIVEN_KEY, build, describe
from .schedule import DISTILLED_STEPS, distilled_sigmas, sigmas

MODELS = "LongCat-Video"

__all__ = [
    "DISTILLED_STEPS",
    "GIVEN_KEY",
    "MODELS",
    "attach",
    "build",
    "describe",
    "distilled_sigmas",
    "is_longcat",
    "room_for_cache",
    "sigmas",
    "supports",
    "with_lora",
    "world_of",
]


def world_of(model: Any, width: int, height: int) -> World:
    """The model's cache for videos of `width` x `height` pixels: the frames that are given, in one forward."""
    return replace(shape.world_of(model, width, height), prefilled=True)

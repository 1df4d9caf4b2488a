"""The host's CausalWanModel and what is built on it: Causal-Forcing, Self-Forcing, LongLive shapes, LingBot-World."""

from __future__ import annotations

from .adapter import attach, supports
from .shape import room_for_cache, world_of

MODELS = "Causal-Forcing, Self-Forcing, LingBot-World and other causal Wan 2.1 checkpoints"

__all__ = ["MODELS", "attach", "room_for_cache", "supports", "world_of"]

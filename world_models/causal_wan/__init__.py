"""The host's CausalWanModel and what is built on it: Causal-Forcing, Self-Forcing, LongLive shapes, LingBot-World."""

from __future__ import annotations

from .adapter import attach, supports

MODELS = "Causal-Forcing, Self-Forcing, LingBot-World and other causal Wan 2.1 checkpoints"

__all__ = ["MODELS", "attach", "supports"]

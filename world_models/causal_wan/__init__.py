"""The host's CausalWanModel: Causal-Forcing, Self-Forcing, LongLive-shaped checkpoints."""

from __future__ import annotations

from .adapter import attach, supports

MODELS = "Causal-Forcing, Self-Forcing and other causal Wan 2.1 checkpoints"

__all__ = ["MODELS", "attach", "supports"]

"""Triton twins of quantwm_core's operations. Importing this package registers those that can run here."""

from __future__ import annotations

import logging
import os

import torch

from ..quantwm_core import backends

logger = logging.getLogger(__name__)


def _register() -> str | None:
    """Import the kernels, which registers them; the reason when that is not possible."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "no NVIDIA GPU is visible"
    try:
        from . import decode, encode, reading, statistics  # noqa: F401
    except (ImportError, AttributeError, OSError) as error:
        # Triton is optional, comes in many versions, and on some systems without the compiler it needs.
        return f"Triton cannot be used ({error})"
    return None


_reason = _register()
if _reason:
    backends.mark_unavailable("triton", _reason)
    logger.info("QuantWM: PyTorch does the work of the GPU kernels: %s.", _reason)

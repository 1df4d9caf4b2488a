"""Triton twins of quantwm_core's operations. Importing this package registers those that can run here."""

from __future__ import annotations

import logging

from ..quantwm_core import backends

logger = logging.getLogger(__name__)

try:
    import triton  # noqa: F401
except ImportError as error:
    backends.mark_unavailable("triton", f"not installed ({error})")
    logger.info("QuantWM: Triton is not installed; the PyTorch path is used. It is optional and speeds up NVIDIA GPUs.")
else:
    from . import decode  # noqa: F401

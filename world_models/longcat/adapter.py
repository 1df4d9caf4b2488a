"""Attach a packed cache to LongCat-Video: its runs are opened by wrappers, so other settings are other wrappers.

Keys are packed before RoPE and turned when they are read; the correction of keys is taken after RoPE, where queries
are. The given frames are one span, packed within the forward that computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...quantwm_core import CacheHandle, CacheSettings
from ...quantwm_core.cache import check_backend
from ...quantwm_core.methods import Method
from ...quantwm_core.overrides import check_overrides
from ...quantwm_core.probe import LogitProbe
from ...quantwm_core.rotation import check_rotation
from .network import LongCatModel
from .run import Runs


def supports(model: Any) -> bool:
    return isinstance(getattr(model.model, "diffusion_model", None), LongCatModel)


def attach(
    model: Any,
    settings: CacheSettings,
    on_block: Callable[[dict], None] | None = None,
    method: Method | None = None,
    probe: LogitProbe | None = None,
) -> tuple[Any, CacheHandle]:
    """A patched clone and the handle of its runs; see `world_models.attach`."""
    network = model.model.diffusion_model
    check_backend(settings, network.head_dim, model.load_device)
    check_overrides(settings.overrides, network.num_layers, network.num_heads)
    if settings.compresses:
        check_rotation(settings)
    patched = model.clone()
    runs = Runs(settings, on_block, method, probe)
    runs.attach(patched)
    return patched, runs.handle

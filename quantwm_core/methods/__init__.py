"""The methods by name. A method turns keys and values into a `PackedSpan` and back; see `base.Method`."""

from __future__ import annotations

from ..settings import CacheSettings
from .base import LayerState, Method
from .kivi import KIVI
from .quantwm import QuantWM
from .quantwm_paper import QuantWMPaper, plain_rounding
from .quarot import QuaRot
from .qvg import PRO_GROUP, PRO_STAGES, QVG


def _qvg_pro(settings: CacheSettings) -> Method:
    return QVG(settings, "qvg-pro", PRO_STAGES, PRO_GROUP)


_BUILDERS = {
    "quantwm": QuantWM,
    "quantwm-paper": QuantWMPaper,
    "rtn": plain_rounding,
    "kivi": KIVI,
    "qvg": QVG,
    "qvg-pro": _qvg_pro,
    "quarot": QuaRot,
}


def build_method(settings: CacheSettings) -> Method:
    """The method that `settings` name.

    Raises:
        ValueError: for `off`, which stores nothing.
    """
    if settings.method not in _BUILDERS:
        raise ValueError(f"method {settings.method!r} has no codec; one of {', '.join(_BUILDERS)} has.")
    return _BUILDERS[settings.method](settings)


__all__ = ["KIVI", "QVG", "LayerState", "Method", "QuaRot", "QuantWM", "QuantWMPaper", "build_method"]

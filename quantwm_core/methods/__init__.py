"""The methods by name. A method turns keys and values into a `PackedSpan` and back; see `base.Method`."""

from __future__ import annotations

from ..settings import CacheSettings
from .base import LayerState, Method
from .quantwm import QuantWM
from .quantwm_paper import QuantWMPaper


def _rtn(settings: CacheSettings) -> Method:
    return QuantWMPaper(settings, name="rtn", centroids=False, query_sensitive=False, correction=False)


_BUILDERS = {"quantwm": QuantWM, "quantwm-paper": QuantWMPaper, "rtn": _rtn}


def build_method(settings: CacheSettings) -> Method:
    """The method that `settings` name.

    Raises:
        ValueError: for `off`, which stores nothing.
    """
    if settings.method not in _BUILDERS:
        raise ValueError(f"method {settings.method!r} has no codec; one of {', '.join(_BUILDERS)} has.")
    return _BUILDERS[settings.method](settings)


__all__ = ["LayerState", "Method", "QuantWM", "QuantWMPaper", "build_method"]

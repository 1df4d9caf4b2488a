"""A KV cache in few bits, in plain PyTorch; needs neither ComfyUI nor Triton."""

from .accounting import format_report
from .cache import CacheGeometry, LayerCache, WorldCache
from .record import CacheHandle
from .settings import BITS, METHODS, CacheSettings

__all__ = [
    "BITS",
    "METHODS",
    "CacheGeometry",
    "CacheHandle",
    "CacheSettings",
    "LayerCache",
    "WorldCache",
    "format_report",
]

"""QuantWM: world models in ComfyUI with their KV cache in 2 bits."""

from . import kernels  # noqa: F401  (registers what can run here)
from .nodes import comfy_entrypoint

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]

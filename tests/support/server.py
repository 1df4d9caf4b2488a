"""The server of the demo, for tests: `from support.server import comfy_server`."""

from benchmarks.server import ComfyServer, PromptFailed, comfy_server

__all__ = ["ComfyServer", "PromptFailed", "comfy_server"]

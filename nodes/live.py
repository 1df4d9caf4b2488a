"""The panel on Cache Memory Stats: what it shows, and sending that to the page of a run while it samples.

A page says at the start of a run that it shows the panel (`ROUTE`). Only such pages get events, a few a second, over
ComfyUI's own websocket. What the finished node returns needs no page: the numbers are in its outputs as well.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import comfy.model_management as management
from aiohttp import web

from ..quantwm_core import CacheHandle
from .progress import executing_prompt_id, running_server

EVENT = "quantwm.memory"
ROUTE = "/quantwm/watch"
STATS = "QuantWMCacheStats"
# Key of the finished panel among the node's outputs for its page.
OUTPUT = "quantwm_memory"
SECONDS_BETWEEN = 0.25
# A chart is some hundred pixels wide: more points than this would not show.
MOST_POINTS = 160

# Prompts that a page watches. Few run at once, and those that are over cost nothing but their names.
_watched: deque[str] = deque(maxlen=32)


def add_route() -> None:
    """Let pages say which prompt they watch; without a server there is nothing to add to."""
    server = running_server()
    if server is None:
        return

    @server.routes.post(ROUTE)
    async def watch(request: web.Request) -> web.Response:
        body = await request.json()
        _watched.append(str(body.get("prompt_id")))
        return web.json_response({})


def watched() -> bool:
    """Whether a page shows the panel of the prompt that is running here."""
    return executing_prompt_id() in _watched


class LivePanel:
    """Sends the state of one Apply To World Model's run to the panels that are connected to it."""

    def __init__(self, apply_id: str | None) -> None:
        self._apply_id = apply_id
        self._sent = 0.0

    def send(self, handle: CacheHandle) -> None:
        """Called after each block. Blocks that follow each other too fast are skipped; the last state comes anyway,
        as the output of Cache Memory Stats."""
        now = time.monotonic()
        if now - self._sent < SECONDS_BETWEEN or not watched():
            return
        client, panels = self._panels()
        if not panels:
            return
        self._sent = now
        running_server().send_sync(EVENT, panel_state(handle) | {"nodes": panels}, client)

    def _panels(self) -> tuple[str | None, list[str]]:
        """The page that queued the running prompt, and the nodes in it that show this cache."""
        server, prompt_id = running_server(), executing_prompt_id()
        if server is None:
            return None, []
        for _, running_id, prompt, extra_data, *_ in server.prompt_queue.get_current_queue_volatile()[0]:
            client = extra_data.get("client_id")
            if running_id == prompt_id and client in server.sockets:
                ours = [self._apply_id, 1]
                return client, [
                    i for i, n in prompt.items() if n["class_type"] == STATS and n["inputs"].get("cache") == ours
                ]
        return None, []


def panel_state(handle: CacheHandle) -> dict[str, Any]:
    """What the panel shows, JSON-ready: of a finished run (`handle.record`), or of one that has got this far.

    Sizes in bytes, times in seconds. `growth` has the sizes in BF16 and as kept, after each block or, in long runs,
    after evenly spaced ones.
    """
    settings, record, history = handle.settings, handle.record, handle.history
    state = {
        "running": record is None and bool(history),
        "method": settings.method,
        "key_bits": settings.key_bits,
        "value_bits": settings.value_bits,
        "growth": _growth(history),
        "memory": device_memory(),
    }
    latest = record or (history[-1] if history else None)
    if latest is None:
        return state
    kept = latest["bytes_unpacked"] + latest.get("bytes_state", 0)
    names = ("tokens", "bytes_bf16", "bytes_by_part", "encode_seconds", "decode_seconds", "backend", "backend_reason")
    state |= {name: latest[name] for name in names}
    blocks = record["blocks"] if record else latest["block"] + 1
    seconds = history[-1]["seconds"] if history else 0.0
    return state | {
        "bytes_packed": latest["bytes_packed"],
        "bytes_unpacked": kept,
        "blocks": blocks,
        "seconds": seconds,
    }


def _growth(history: list[dict]) -> dict[str, list[int]]:
    stride = -(-len(history) // MOST_POINTS) or 1
    # The last block is always among them.
    entries = history[::-1][::stride][::-1]
    return {
        "block": [entry["block"] + 1 for entry in entries],
        "bf16": [entry["bytes_bf16"] for entry in entries],
        "kept": [entry["bytes_packed"] + entry["bytes_unpacked"] for entry in entries],
    }


def device_memory() -> dict[str, Any]:
    """Memory of the card that the host computes on, or of the computer where it has none."""
    device = management.get_torch_device()
    total = management.get_total_memory(device)
    return {"cpu": device.type == "cpu", "total": total, "used": total - management.get_free_memory(device)}

"""The panel on Cache Memory Stats: what it shows, and sending that to the page of a run while it samples.

A page says whether it shows the panel (`ROUTE`). Only the runs of such pages send events, a few a second, over the
server's own websocket. What the finished node returns needs no page: the numbers are in its outputs as well.
"""

from __future__ import annotations

import time
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

# Websocket ids of the pages that show the panel.
_watching: set[str] = set()


def add_route() -> None:
    """Let pages say whether they show the panel; without a server there is nothing to add to."""
    server = running_server()
    if server is None:
        return

    @server.routes.post(ROUTE)
    async def watch(request: web.Request) -> web.Response:
        body = await request.json()
        _watching.intersection_update(server.sockets)
        (_watching.add if body["on"] else _watching.discard)(str(body["client_id"]))
        return web.json_response({})


def watched() -> bool:
    """Whether the page that queued the running prompt shows the panel."""
    return bool(_watching) and _running()[0] in _watching


def _running() -> tuple[str | None, dict[str, dict]]:
    """The page that waits for the running prompt, and the prompt."""
    server, prompt_id = running_server(), executing_prompt_id()
    if server is not None and prompt_id is not None:
        for _, running_id, prompt, extra_data, *_ in server.prompt_queue.get_current_queue_volatile()[0]:
            if running_id == prompt_id and extra_data.get("client_id") in server.sockets:
                return extra_data["client_id"], prompt
    return None, {}


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
        client, prompt = _running()
        panels = [name for name, node in prompt.items() if self._shows(node)]
        if panels:
            self._sent = now
            running_server().send_sync(EVENT, panel_state(handle) | {"nodes": panels}, client)

    def _shows(self, node: dict) -> bool:
        return node["class_type"] == STATS and node["inputs"].get("cache") == [self._apply_id, 1]


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

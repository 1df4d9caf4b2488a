"""Text on nodes while a graph runs, through the server's own channel; silent when there is no server."""

from __future__ import annotations

import sys
from typing import Any

from comfy_execution.utils import get_executing_context

from ..quantwm_core.accounting import against_bf16, format_bytes


def running_server() -> Any | None:
    """ComfyUI's server. Its module is looked up, not imported: under a script or a test there is none, and importing
    it would build half of ComfyUI."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def show_text(text: str, *node_ids: str | None) -> None:
    """Show plain text on the nodes with these ids. Ids that are None or repeated are skipped."""
    # The editor's newer node renderer takes the text as Markdown, where two spaces make a line break.
    text = text.replace("\n", "  \n")
    server = running_server()
    if server is None:
        return
    for node_id in dict.fromkeys(node_ids):
        if node_id is not None:
            server.send_progress_text(text, node_id)


def executing_node_id() -> str | None:
    """Id of the node that the server is running in this context, None outside a server."""
    context = get_executing_context()
    return None if context is None else context.node_id


def executing_prompt_id() -> str | None:
    """Id of the prompt that the server is running in this context, None outside a server."""
    context = get_executing_context()
    return None if context is None else context.prompt_id


def block_text(entry: dict[str, Any]) -> str:
    """Three lines, short enough for a narrow node, about a cache that has just grown.

    `entry` is one of `CacheHandle.history`.
    """
    resident = entry["bytes_packed"] + entry["bytes_unpacked"]
    ratio = entry["bytes_bf16"] / max(resident, 1)
    return (
        f"Block {entry['block'] + 1}: {entry['tokens']:,} tokens cached\n"
        f"{format_bytes(resident)} instead of {format_bytes(entry['bytes_bf16'])}\n" + against_bf16(ratio)
    )


def rollout_text(entry: dict[str, Any]) -> str:
    """Two lines about a video that has just got another block; `entry` is what `WorldSampler.on_block` gets."""
    reach = entry["in_reach"]
    remembered = "all of them" if reach == entry["done"] else f"{reach} of them"
    return (
        f"Block {entry['block']} of {entry['blocks']}: {entry['done']} of {entry['frames']} latent frames\n"
        f"The next block looks back at {remembered}"
    )

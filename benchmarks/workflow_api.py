"""Turn a workflow saved by the ComfyUI editor into the prompt that its HTTP API takes.

One workflow file then serves the template browser and headless runs alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"
NOTES = {"Note", "MarkdownNote"}
SEEDS = {"seed", "noise_seed"}
MUTED, BYPASSED = 2, 4


def to_api_prompt(workflow: dict[str, Any], object_info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Prompt for `POST /prompt` from an editor workflow and the server's `/object_info`.

    Notes disappear, reroutes and bypassed nodes are replaced by what feeds them, muted nodes are left out.
    Saved widget values are matched to inputs by the order of the node's definition, as the editor does it;
    inputs that a workflow is too old to know get their default.

    Raises ValueError for a node type that the server does not know (subgraphs included: unpack them first).
    """
    nodes = {node["id"]: node for node in workflow["nodes"]}
    links = {link[0]: link for link in workflow["links"]}
    prompt = {}
    for node in nodes.values():
        kind = node["type"]
        if kind in NOTES or kind == "Reroute" or node.get("mode", 0) in (MUTED, BYPASSED):
            continue
        if kind not in object_info:
            raise ValueError(
                f"Node {node['id']} is a {kind}, which this server does not know. Install the pack that has "
                f"it; if it is a subgraph, unpack it in the editor."
            )
        inputs = widget_values(node.get("widgets_values") or [], object_info[kind])
        for slot in node.get("inputs", []):
            origin = _origin(slot.get("link"), nodes, links)
            if origin is not None:
                inputs[slot["name"]] = origin
        title = node.get("title") or object_info[kind].get("display_name") or kind
        prompt[str(node["id"])] = {"class_type": kind, "inputs": inputs, "_meta": {"title": title}}
    return prompt


def widget_values(saved: list[Any] | dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """Saved widget values of a node by input name. `info` is the node's entry in `/object_info`."""
    if isinstance(saved, dict):
        return dict(saved)
    order = [
        (name, info["input"][group][name])
        for group in ("required", "optional")
        for name in info["input_order"].get(group, [])
    ]
    return dict(_named(order, iter(saved)))


def _named(order: list[tuple[str, Any]], saved: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    for name, spec in order:
        kind, options = spec[0], spec[1] if len(spec) > 1 else {}
        if options.get("forceInput"):
            continue
        if isinstance(kind, list) or kind in WIDGET_TYPES:
            yield name, next(saved, _default(kind, options))
            # The editor puts a helper widget behind these, and saves it.
            if options.get("control_after_generate", kind == "INT" and name in SEEDS) or "image_upload" in options:
                next(saved, None)
        elif kind == DYNAMIC_COMBO:
            choice = next(saved, options["options"][0]["key"])
            yield name, choice
            chosen = next(option for option in options["options"] if option["key"] == choice)
            nested = [(f"{name}.{key}", spec) for group in chosen["inputs"].values() for key, spec in group.items()]
            yield from _named(nested, saved)


def _default(kind: str | list[Any], options: dict[str, Any]) -> Any:
    choices = kind if isinstance(kind, list) else options.get("options")
    return options.get("default", choices[0] if choices else None)


def _origin(link_id: int | None, nodes: dict[int, Any], links: dict[int, list[Any]]) -> list[Any] | None:
    """[node id, output slot] that feeds a link, past reroutes and bypassed nodes; None when nothing does."""
    if link_id is None:
        return None
    _, node_id, output, _, _, kind = links[link_id]
    node = nodes[node_id]
    if node["type"] == "Reroute":
        return _origin(node["inputs"][0]["link"], nodes, links)
    if node.get("mode", 0) == MUTED:
        return None
    if node.get("mode", 0) == BYPASSED:
        same = next((slot for slot in node["inputs"] if slot["type"] == kind and slot["link"] is not None), None)
        return _origin(same["link"], nodes, links) if same else None
    return [str(node_id), output]

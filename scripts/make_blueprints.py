"""Write subgraphs/*.json: each template's way from picture and prompt to frames as one node, with its cache as output.

.venv/bin/python -m scripts.make_blueprints
"""

from __future__ import annotations

import copy
import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.host import ROOT

FOLDER = ROOT / "subgraphs"
NAME = "World rollout with 2-bit memory"
NAMESPACE = uuid.UUID("6f9d2c1e-3b7a-4d56-9a44-0d0f5a1c7e21")
# Ids that the editor gives to the two sides of every subgraph.
INPUT_SIDE, OUTPUT_SIDE = -10, -20
ROW, SIDE_WIDTH, GAP = 20, 160, 120

# Input of a node inside: (node id, input name).
Target = tuple[int, str]


@dataclass(frozen=True)
class Entry:
    """An input of the blueprint. `value` is the place of its widget's value at the first target; None: a socket."""

    name: str
    kind: str
    targets: tuple[Target, ...]
    value: int | None = None


@dataclass(frozen=True)
class Blueprint:
    """`inside`: node ids of the template; `outputs`: (name, type, node id, slot)."""

    model: str
    template: str
    description: str
    inside: frozenset[int]
    inputs: tuple[Entry, ...]
    outputs: tuple[tuple[str, str, int, int], ...]

    @property
    def title(self) -> str:
        return f"{NAME} ({self.model})"

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.title}.json"


BLUEPRINTS = (
    Blueprint(
        "tiny world",
        "tiny-world",
        "Looks round a small room once and paints the next frames from memory, with the KV cache in 2 bits. Needs no "
        "download and runs on any machine.",
        frozenset({2, 3, 4, 8, 9, 10, 12, 13, 14, 15, 16, 17}),
        (
            Entry("world_seed", "INT", ((10, "world_seed"),), 0),
            Entry("turn_rate", "FLOAT", ((9, "turn_rate"), (10, "turn_rate")), 0),
            Entry("orbit", "FLOAT", ((9, "orbit"), (10, "orbit")), 1),
            Entry("length", "INT", ((10, "length"),), 5),
            Entry("noise_seed", "INT", ((12, "noise_seed"),), 0),
            Entry("preset", "COMBO", ((3, "preset"),), 14),
        ),
        (("frames", "IMAGE", 17, 0), ("true frames", "IMAGE", 10, 2), ("cache", "QUANTWM_CACHE", 4, 1)),
    ),
    Blueprint(
        "Causal-Forcing",
        "causal-forcing-image-to-video",
        "Image to video with Causal-Forcing, with the KV cache in 2 bits. Connect cache to Cache Memory Stats to see "
        "what it takes.",
        frozenset({2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16}),
        (
            Entry("start_image", "IMAGE", ((8, "start_image"),)),
            Entry("prompt", "STRING", ((9, "text"),), 0),
            Entry("width", "INT", ((8, "width"),), 0),
            Entry("height", "INT", ((8, "height"),), 1),
            Entry("length", "INT", ((8, "length"),), 2),
            Entry("noise_seed", "INT", ((11, "noise_seed"),), 0),
            Entry("preset", "COMBO", ((5, "preset"),), 14),
            Entry("unet_name", "COMBO", ((2, "unet_name"),), 0),
            Entry("clip_name", "COMBO", ((3, "clip_name"),), 0),
            Entry("vae_name", "COMBO", ((4, "vae_name"),), 0),
        ),
        (("frames", "IMAGE", 16, 0), ("cache", "QUANTWM_CACHE", 6, 1)),
    ),
    Blueprint(
        "LingBot v2",
        "lingbot-v2-image-to-world",
        "Image to world with LingBot-World v2: a picture, a prompt and a Camera Path, whose length is the video's, "
        "with the KV cache in 2 bits.",
        frozenset({2, 3, 4, 5, 6, 8, 11, 12, 13, 14, 15, 16, 20}),
        (
            Entry("start_image", "IMAGE", ((20, "image"),)),
            Entry("camera", "QUANTWM_CAMERA", ((11, "camera"),)),
            Entry("prompt", "STRING", ((8, "text"),), 0),
            Entry("noise_seed", "INT", ((12, "noise_seed"),), 0),
            Entry("preset", "COMBO", ((5, "preset"),), 14),
            Entry("model_name", "COMBO", ((2, "model_name"),), 0),
            Entry("clip_name", "COMBO", ((3, "clip_name"),), 0),
            Entry("vae_name", "COMBO", ((4, "vae_name"),), 0),
        ),
        (("frames", "IMAGE", 16, 0), ("cache", "QUANTWM_CACHE", 6, 1)),
    ),
    Blueprint(
        "LongCat-Video",
        "longcat-image-to-video",
        "Image to video with LongCat-Video, with the KV cache of its given frames in 2 bits. Connect video in place of "
        "start_image to continue one.",
        frozenset({2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16}),
        (
            Entry("start_image", "IMAGE", ((10, "start_image"),)),
            Entry("video", "IMAGE", ((10, "video"),)),
            Entry("prompt", "STRING", ((8, "text"),), 0),
            Entry("negative prompt", "STRING", ((9, "text"),), 0),
            Entry("width", "INT", ((10, "width"),), 0),
            Entry("height", "INT", ((10, "height"),), 1),
            Entry("length", "INT", ((10, "length"),), 2),
            Entry("given_frames", "INT", ((10, "given_frames"),), 3),
            Entry("noise_seed", "INT", ((11, "noise_seed"),), 0),
            Entry("cfg", "FLOAT", ((12, "cfg"),), 0),
            Entry("schedule", "COMBO", ((14, "schedule"),), 0),
            Entry("preset", "COMBO", ((5, "preset"),), 14),
            Entry("model_name", "COMBO", ((2, "model_name"),), 0),
            Entry("clip_name", "COMBO", ((3, "clip_name"),), 0),
            Entry("vae_name", "COMBO", ((4, "vae_name"),), 0),
        ),
        (("frames", "IMAGE", 16, 0), ("overlap", "INT", 10, 3), ("cache", "QUANTWM_CACHE", 6, 1)),
    ),
)


def build(blueprint: Blueprint) -> dict[str, Any]:
    """The file's content: a workflow of one node, whose definition holds the template's nodes."""
    template = json.loads((ROOT / "workflows" / f"{blueprint.template}.json").read_text(encoding="utf-8"))
    nodes = {node["id"]: copy.deepcopy(node) for node in template["nodes"] if node["id"] in blueprint.inside}
    names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    links = [dict(zip(names, link)) for link in template["links"] if {link[1], link[3]} <= blueprint.inside]
    _cut(nodes, {link["id"] for link in links})
    free = iter(range(template["last_link_id"] + 1, 1 << 20))
    inputs, outputs = [], []
    for slot, entry in enumerate(blueprint.inputs):
        ids = [_connect(nodes, links, entry, slot, target, next(free)) for target in entry.targets]
        inputs.append({"id": _id(blueprint, f"input {entry.name}"), "name": entry.name, "type": entry.kind})
        inputs[-1]["linkIds"] = ids
    for slot, (name, kind, origin, origin_slot) in enumerate(blueprint.outputs):
        link = next(free)
        links.append(dict(zip(names, (link, origin, origin_slot, OUTPUT_SIDE, slot, kind))))
        nodes[origin]["outputs"][origin_slot].setdefault("links", []).append(link)
        outputs.append({"id": _id(blueprint, f"output {name}"), "name": name, "type": kind, "linkIds": [link]})
    left = min(node["pos"][0] for node in nodes.values()) - SIDE_WIDTH - GAP
    right = max(node["pos"][0] + node["size"][0] for node in nodes.values()) + GAP
    last = {"node": max(nodes) + 1, "link": next(free) - 1}
    definition = {
        "id": _id(blueprint, "definition"),
        "version": 1,
        "state": {"lastGroupId": 0, "lastNodeId": last["node"], "lastLinkId": last["link"], "lastRerouteId": 0},
        "revision": 0,
        "config": {},
        "name": blueprint.title,
        "inputNode": {"id": INPUT_SIDE, "bounding": [left, 0, SIDE_WIDTH, 40 + ROW * len(inputs)]},
        "outputNode": {"id": OUTPUT_SIDE, "bounding": [right, 0, SIDE_WIDTH, 40 + ROW * len(outputs)]},
        "inputs": inputs,
        "outputs": outputs,
        "widgets": [],
        "nodes": list(nodes.values()),
        "groups": [],
        "links": links,
        "extra": {},
        "category": "Video generation and editing/World models",
        "description": blueprint.description,
    }
    aliases = ["quantwm", "world model", "kv cache", blueprint.model.lower()]
    return {
        "id": _id(blueprint, "workflow"),
        "revision": 0,
        "last_node_id": last["node"],
        "last_link_id": last["link"],
        "nodes": [_outside(blueprint, nodes, last["node"])],
        "links": [],
        "groups": [],
        "definitions": {"subgraphs": [definition]},
        "config": {},
        "extra": {"BlueprintDescription": blueprint.description, "BlueprintSearchAliases": aliases},
        "version": 0.4,
    }


def _cut(nodes: dict[int, dict], kept: set[int]) -> None:
    """Forget links to nodes that stay outside."""
    for node in nodes.values():
        for entry in node["inputs"]:
            entry["link"] = entry.get("link") if entry.get("link") in kept else None
        for output in node["outputs"]:
            output["links"] = [link for link in output.get("links") or [] if link in kept]


def _connect(nodes: dict[int, dict], links: list[dict], entry: Entry, slot: int, target: Target, link: int) -> int:
    """A link from the subgraph's input to a node's; a widget becomes an input with a socket by that."""
    node_id, name = target
    sockets = nodes[node_id]["inputs"]
    found = next((i for i, socket in enumerate(sockets) if socket["name"] == name), None)
    if found is None:
        found = len(sockets)
        sockets.append({"name": name, "type": entry.kind, "widget": {"name": name}})
    sockets[found]["link"] = link
    ends = {"origin_id": INPUT_SIDE, "origin_slot": slot, "target_id": node_id, "target_slot": found}
    links.append({"id": link, **ends, "type": entry.kind})
    return link


def _outside(blueprint: Blueprint, nodes: dict[int, dict], node_id: int) -> dict[str, Any]:
    """The node that stands for the subgraph."""
    inputs, values = [], []
    for entry in blueprint.inputs:
        inputs.append({"name": entry.name, "type": entry.kind, "link": None})
        if entry.value is not None:
            inputs[-1]["widget"] = {"name": entry.name}
            values.append(nodes[entry.targets[0][0]]["widgets_values"][entry.value])
    return {
        "id": node_id,
        "type": _id(blueprint, "definition"),
        "pos": [0, 0],
        "size": [400, 120 + 24 * len(inputs) + (120 if any(e.kind == "STRING" for e in blueprint.inputs) else 0)],
        "flags": {},
        "order": 0,
        "mode": 0,
        "inputs": inputs,
        "outputs": [{"name": name, "type": kind, "links": []} for name, kind, _, _ in blueprint.outputs],
        "title": blueprint.title,
        "properties": {"cnr_id": "quantwm"},
        "widgets_values": values,
    }


def _id(blueprint: Blueprint, what: str) -> str:
    return str(uuid.uuid5(NAMESPACE, f"{blueprint.model}: {what}"))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for blueprint in BLUEPRINTS:
        text = json.dumps(build(blueprint), indent=2, ensure_ascii=False) + "\n"
        blueprint.path.write_text(text, encoding="utf-8")
        print(blueprint.path.relative_to(ROOT))


if __name__ == "__main__":
    main()

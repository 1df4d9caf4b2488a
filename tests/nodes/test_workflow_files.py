"""The templates: complete, readable, and with what a missing-model or missing-node dialog needs."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from benchmarks.host import ROOT

FILES = sorted((ROOT / "workflows").glob("*.json"))
TITLE = 30
LATER_PART = re.compile(r"-(?!0*1-)\d+-of-\d+\.safetensors$")
MODEL_HOSTS = ("https://huggingface.co/", "https://civitai.com/")


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def file(request) -> Path:
    return request.param


@pytest.fixture
def workflow(file) -> dict:
    return json.loads(file.read_text())


def box(node: dict) -> tuple[float, float, float, float]:
    (x, y), (width, height) = node["pos"], node["size"]
    return x, y - TITLE, x + width, y + height


def test_links_join_what_they_name(workflow):
    nodes = {node["id"]: node for node in workflow["nodes"]}
    assert len(nodes) == len(workflow["nodes"])
    for link, origin, output, target, slot, kind in workflow["links"]:
        assert link in nodes[origin]["outputs"][output]["links"]
        assert nodes[target]["inputs"][slot]["link"] == link
        assert kind == nodes[origin]["outputs"][output]["type"]
        assert kind in nodes[target]["inputs"][slot]["type"].split(",")


def test_layout_is_tidy(workflow):
    boxes = {node["id"]: box(node) for node in workflow["nodes"]}
    for (a, (l1, t1, r1, b1)), (b, (l2, t2, r2, b2)) in combinations(boxes.items(), 2):
        assert r1 <= l2 or r2 <= l1 or b1 <= t2 or b2 <= t1, f"nodes {a} and {b} overlap"
    groups = [group["bounding"] for group in workflow["groups"]]
    assert len(groups) >= 3
    for node in workflow["nodes"]:
        left, top, right, bottom = box(node)
        inside = [
            x <= left and y <= top and right <= x + width and bottom <= y + height for x, y, width, height in groups
        ]
        assert any(inside) or node["type"] == "MarkdownNote", f"node {node['id']} is in no group"


def test_the_managers_can_find_everything(workflow):
    for node in workflow["nodes"]:
        if node["type"] == "MarkdownNote":
            continue
        pack = "quantwm" if node["type"].startswith("QuantWM") else "comfy-core"
        assert node["properties"]["cnr_id"] == pack and node["properties"]["ver"]
        files = [value for value in node.get("widgets_values", []) if str(value).endswith(".safetensors")]
        models = node["properties"].get("models", [])
        # The first file of a checkpoint in parts is what a loader names; the list has all of them.
        assert [model["name"] for model in models if not LATER_PART.search(model["name"])] == files
        assert all(model["url"].startswith(MODEL_HOSTS) and model["directory"] for model in models)


def test_help_and_thumbnail(workflow, file):
    notes = [node for node in workflow["nodes"] if node["type"] == "MarkdownNote"]
    texts = [note["widgets_values"][0] for note in notes]
    assert texts and all(len(text) < 1000 for text in texts)
    # Nodes 2.0 paints code in a note dark blue on grey.
    assert not any("`" in text for text in texts)
    assert file.with_suffix(".jpg").is_file()

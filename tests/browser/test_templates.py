"""Every template, in both node renderers: the page sends what the file says, and draws it without overlaps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations

import pytest
from playwright.sync_api import Page

from benchmarks.host import ROOT
from benchmarks.workflow_api import to_api_prompt

FILES = sorted((ROOT / "workflows").glob("*.json"))
CONTINUATION = ROOT / "workflows" / "longcat-continuation.json"
TITLE = 30
SETTLE_MS = 300
# Ids are text on the page and numbers in a file.
BOXES = "app.graph.nodes.map(node => [String(node.id), ...node.pos, ...node.size])"
GROWING = """Object.fromEntries(app.graph.nodes.map(node => [
    String(node.id), node.inputs.map(input => input.name).filter(name => name.includes("."))]))"""


def load(page: Page, workflow: dict) -> dict[str, tuple[float, float, float, float]]:
    """Load a workflow and return left, top, right and bottom of each node, once the page has given all their sizes."""
    page.evaluate("workflow => app.loadGraphData(workflow)", workflow)
    before = None
    while (boxes := page.evaluate(BOXES)) != before:
        before = boxes
        page.wait_for_timeout(SETTLE_MS)
    return {name: (x, y - TITLE, x + width, y + height) for name, x, y, width, height in boxes}


def sent(page: Page) -> dict:
    """The prompt that Run would send, without the titles."""
    return bare(page.evaluate("app.graphToPrompt().then(prompt => prompt.output)"))


def bare(prompt: dict) -> dict:
    return {name: (node["class_type"], node["inputs"]) for name, node in prompt.items()}


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_page_sends_what_the_file_says(shared_page, server, file):
    page = shared_page
    workflow = json.loads(file.read_text())
    boxes = load(page, workflow)
    said = bare(to_api_prompt(workflow, server.object_info()))
    assert sent(page) == said
    for (a, (l1, t1, r1, b1)), (b, (l2, t2, r2, b2)) in combinations(boxes.items(), 2):
        assert r1 <= l2 or r2 <= l1 or b1 <= t2 or b2 <= t1, f"nodes {a} and {b} overlap on the page"
    # The editor mixes up the slots of an input that has grown beyond ten, a little more with each time it is loaded.
    load(page, page.evaluate("app.graph.serialize()"))
    assert sent(page) == said
    for name, slots in page.evaluate(GROWING).items():
        numbers = [int(slot.rpartition("image")[2]) for slot in slots]
        assert numbers == sorted(numbers), f"node {name} shows its slots as {numbers}"


def joined(prompt: dict, node: str) -> Iterator[str]:
    """Nodes whose frames a Batch Images node puts behind each other, in the order of the video."""
    kind, inputs = prompt[node]
    if kind != "BatchImagesNode":
        yield node
        return
    for slot in sorted(inputs, key=lambda name: int(name.removeprefix("images.image"))):
        yield from joined(prompt, inputs[slot][0])


def video_of(page: Page) -> list[str]:
    """The nodes whose frames become the video, in its order. Cache Memory Stats has to wait for the same frames."""
    prompt = sent(page)
    (frames,) = (inputs["images"] for kind, inputs in prompt.values() if kind == "CreateVideo")
    (after,) = (inputs["after"] for kind, inputs in prompt.values() if kind == "QuantWMCacheStats")
    assert after == frames
    return list(joined(prompt, frames[0]))


def test_a_continuation_of_fewer_segments(shared_page):
    """The note says to delete or mute the last ones: what is left stays in its order."""
    page, workflow = shared_page, json.loads(CONTINUATION.read_text())
    load(page, workflow)
    whole = video_of(page)
    assert len(whole) == 12
    boxes = [group["bounding"] for group in workflow["groups"] if group["title"] in ("Segment 10", "Segment 11")]
    last = [
        node["id"]
        for node in workflow["nodes"]
        if any(x < node["pos"][0] < x + width and y < node["pos"][1] < y + height for x, y, width, height in boxes)
    ]
    page.evaluate("ids => app.canvas.selectItems(app.graph.nodes.filter(node => ids.includes(Number(node.id))))", last)
    mute = "app.extensionManager.command.execute('Comfy.Canvas.ToggleSelectedNodes.Mute')"
    for change, left in ((mute, whole[:-2]), (mute, whole), ("app.canvas.deleteSelected()", whole[:-2])):
        page.evaluate(change)
        page.wait_for_timeout(SETTLE_MS)
        assert video_of(page) == left

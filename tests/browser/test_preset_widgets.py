"""Presets fill the other inputs in, by mouse, in both node renderers; the expected ratio follows at once."""

from __future__ import annotations

import json

import pytest
import requests
from playwright.sync_api import Page, expect

from benchmarks.host import ROOT

WORKFLOW = json.loads((ROOT / "workflows" / "tiny-world.json").read_text())
PRESETS = json.loads((ROOT / "quantwm_core" / "presets.json").read_text())
KIND = "QuantWMKVCache"
ARROW = 24
# After a graph is loaded its view and the heights of its nodes change for a few frames.
SETTLE_MS = 250


def values(page: Page) -> dict:
    pairs = page.evaluate(
        """kind => app.graph.nodes.find(node => node.type === kind).widgets
            .filter(widget => widget.serialize !== false).map(widget => [widget.name, widget.value])""",
        KIND,
    )
    return dict(pairs)


def filled(preset: str) -> dict:
    """Widget values that a preset stands for: bits are a list of words."""
    bits = {name: str(PRESETS[preset][name]) for name in ("key_bits", "value_bits")}
    return PRESETS[preset] | bits | {"preset": preset, "cache_device": "gpu", "backend": "auto"}


def click_arrow(page: Page, name: str, right: bool) -> None:
    """Press the arrow at an end of a widget that the classic renderer has drawn, once it stands still."""
    before = None
    while (place := arrow_of(page, name, right)) != before:
        before = place
        page.wait_for_timeout(SETTLE_MS)
    page.mouse.click(*place)


def arrow_of(page: Page, name: str, right: bool) -> list[float]:
    """Where on the page the arrow is drawn now."""
    return page.evaluate(
        """([kind, name, right, arrow]) => {
            const node = app.graph.nodes.find(node => node.type === kind);
            const widget = node.widgets.find(widget => widget.name === name);
            const { scale, offset } = app.canvas.ds;
            const left = node.pos[0] + (right ? node.size[0] - arrow : arrow);
            const box = app.canvas.canvas.getBoundingClientRect();
            return [box.x + (left + offset[0]) * scale, box.y + (node.pos[1] + widget.y + 10 + offset[1]) * scale];
        }""",
        [KIND, name, right, ARROW],
    )


def expect_ratio(page: Page, server, model: str | None = "tiny world (built in)", world: str = "tiny world") -> float:
    """The line below the inputs is what the server reckons for their values now."""
    body = {"widgets": values(page), "model": model}
    ratio = requests.post(f"{server.url}/quantwm/expected", json=body, timeout=60).json()["ratio"]
    expect(page.locator(".quantwm-expected")).to_have_text(f"\u2248 {ratio:.1f}\u00d7 smaller than BF16 ({world})")
    return ratio


def open_template(page: Page) -> None:
    page.evaluate("workflow => app.loadGraphData(workflow)", WORKFLOW)
    # By then the widgets are drawn where the mouse will look for them.
    expect(page.locator(".quantwm-expected")).to_contain_text("smaller than BF16")


def test_classic_nodes(page, server, screenshot):
    open_template(page)
    balanced = expect_ratio(page, server)
    click_arrow(page, "preset", right=False)
    assert values(page) == filled("paper")
    paper = expect_ratio(page, server)
    click_arrow(page, "preset", right=False)
    assert values(page) == filled("best quality")
    best = expect_ratio(page, server)
    assert len({balanced, paper, best}) == 3 and balanced > best
    screenshot("preset-classic")
    click_arrow(page, "key_bits", right=True)
    assert values(page) == filled("best quality") | {"key_bits": "8", "preset": "custom"}
    # What a preset leaves open may change without ending it.
    click_arrow(page, "preset", right=False)
    click_arrow(page, "backend", right=True)
    assert values(page) == filled("paper") | {"backend": "triton"}
    box = page.locator(".quantwm-expected").bounding_box()
    assert box["height"] > 10, "the line is cut off"


class TestVueNodes:
    @pytest.fixture
    def settings(self) -> dict:
        return {"Comfy.VueNodes.Enabled": True}

    def test_nodes_2(self, page, server, screenshot):
        open_template(page)
        cache = next(node["id"] for node in WORKFLOW["nodes"] if node["type"] == KIND)
        node = page.locator(f'[data-node-id="{cache}"]')

        def choose(name: str, value: str) -> None:
            node.get_by_role("combobox", name=name).click()
            page.get_by_role("option", name=value, exact=True).click()

        choose("preset", "best quality")
        assert values(page) == filled("best quality")
        expect(node.get_by_role("combobox", name="key_bits")).to_have_text("4")
        expect_ratio(page, server)
        screenshot("preset-nodes2")
        choose("key_bits", "2")
        assert values(page) == filled("best quality") | {"key_bits": "2", "preset": "custom"}
        expect(node.get_by_role("combobox", name="preset")).to_have_text("custom")


def test_a_linked_input_ends_the_preset(page):
    open_template(page)
    click_arrow(page, "preset", right=False)
    page.evaluate(
        """kind => {
            const node = app.graph.nodes.find(node => node.type === kind);
            const rank = LiteGraph.createNode("PrimitiveInt");
            app.graph.add(rank);
            rank.connect(0, node, node.inputs.findIndex(input => input.name === "rank"));
        }""",
        KIND,
    )
    assert values(page) == filled("paper") | {"preset": "custom"}


def test_a_saved_preset_loads_as_it_was(page):
    open_template(page)
    click_arrow(page, "preset", right=False)
    saved = page.evaluate("app.graph.serialize()")
    page.evaluate("app.graph.clear()")
    page.evaluate("workflow => app.loadGraphData(workflow)", saved)
    assert values(page) == filled("paper")
    # Values of another version's preset: what was saved is what is shown and run.
    node = next(node for node in saved["nodes"] if node["type"] == KIND)
    node["widgets_values"][6] = 12
    page.evaluate("workflow => app.loadGraphData(workflow)", saved)
    assert values(page) == filled("paper") | {"rank": 12, "preset": "custom"}


def test_the_ratio_without_a_model(page, server):
    page.evaluate("kind => app.graph.add(LiteGraph.createNode(kind))", KIND)
    expect_ratio(page, server, None, "832x480")


class TestDefaultBackend:
    @pytest.fixture
    def settings(self) -> dict:
        return {"QuantWM.DefaultBackend": "torch"}

    def test_is_for_new_nodes_only(self, page):
        page.evaluate("kind => app.graph.add(LiteGraph.createNode(kind))", KIND)
        assert values(page)["backend"] == "torch"
        page.evaluate("workflow => app.loadGraphData(workflow)", WORKFLOW)
        assert values(page)["backend"] == "auto"

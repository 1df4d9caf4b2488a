"""What an artist does: open the template, look at its nodes, press Run, read what the memory took."""

import json
import re

from playwright.sync_api import Page, expect

from benchmarks.host import ROOT

WORKFLOW = json.loads((ROOT / "workflows" / "tiny-world.json").read_text())
RUN_MS = 180_000
THUMBNAIL = 640

KV_CACHE = {
    "method": "quantwm",
    "key_bits": "2",
    "value_bits": "2",
    "group_size": 64,
    "centroids": 0,
    "candidates": 0,
    "rank": 0,
    "span_blocks": 0,
    "keep_first_blocks": 0,
    "keep_recent_blocks": 0,
    "cache_device": "gpu",
    "backend": "auto",
    "jensen": "off",
    "bit_overrides": "",
    "preset": "custom",
}


def open_template(page: Page, name: str) -> None:
    """Open a template of the pack from the template browser."""
    browser = page.get_by_role("dialog")
    page.locator(".templates-tab-button").click()
    browser.get_by_text("quantwm", exact=True).first.click()
    card = page.get_by_test_id(f"template-workflow-{name}")
    expect(card.get_by_role("img").first).to_have_js_property("naturalWidth", THUMBNAIL)
    card.click()
    page.wait_for_function("count => app.graph.nodes.length === count", arg=len(WORKFLOW["nodes"]))
    expect(browser).to_have_count(0)


def widgets(page: Page, kind: str) -> dict:
    """Widget values by name, in order, of the only node of a type."""
    pairs = page.evaluate(
        """kind => app.graph.nodes.find(node => node.type === kind).widgets
            .filter(widget => widget.serialize !== false).map(widget => [widget.name, widget.value])""",
        kind,
    )
    return dict(pairs)


def set_widgets(page: Page, kind: str, **values: object) -> None:
    page.evaluate(
        """([kind, values]) => {
            const node = app.graph.nodes.find(node => node.type === kind);
            for (const [name, value] of Object.entries(values)) {
                node.widgets.find(widget => widget.name === name).value = value;
            }
        }""",
        [kind, values],
    )


def text_on(page: Page, kind: str) -> str:
    """What the server has written on a node."""
    return page.evaluate(
        """kind => app.graph.nodes.find(node => node.type === kind)
            .widgets?.find(widget => widget.name === "$$node-text-preview")?.value ?? "" """,
        kind,
    )


def test_template_runs_from_the_page(page, screenshot):
    open_template(page, "tiny-world")
    assert page.evaluate("app.graph.nodes.every(node => node.type in LiteGraph.registered_node_types)")
    assert list(widgets(page, "QuantWMKVCache").items()) == list(KV_CACHE.items())
    assert widgets(page, "QuantWMLoadWorldModel") == {
        "model_name": "tiny world (built in)",
        "weight_dtype": "default",
    }
    assert widgets(page, "QuantWMTinyWorldSeed")["length"] == 36
    screenshot("template")

    set_widgets(page, "QuantWMTinyWorldSeed", seed_frames=6, length=12)
    page.get_by_test_id("queue-button").click()
    expect(page.locator(".quantwm-finished")).to_be_visible(timeout=RUN_MS)
    for kind in ("QuantWMApply", "SamplerCustomAdvanced"):
        assert re.fullmatch(
            r"Block 3: 1,152 tokens cached\s+[\d.]+ MiB instead of 6.75 MiB\s+\d\.\dx smaller than BF16",
            text_on(page, kind),
        )
    screenshot("stats")


def test_template_keeps_its_layout(page):
    page.evaluate("workflow => app.loadGraphData(workflow)", WORKFLOW)
    grown = page.evaluate(
        """sizes => app.graph.nodes.filter(node => node.size[0] > sizes[node.id][0]
            || node.size[1] > sizes[node.id][1]).map(node => node.title)""",
        {node["id"]: node["size"] for node in WORKFLOW["nodes"]},
    )
    assert not grown, "the editor needs more room for these nodes than the template gives"


def test_help_opens_from_a_node(page, screenshot):
    page.evaluate("workflow => app.loadGraphData(workflow)", WORKFLOW)
    page.evaluate("app.canvas.selectNode(app.graph.nodes.find(node => node.type === 'QuantWMKVCache'))")
    page.get_by_test_id("info-button").click()
    expect(page.get_by_text("A world model remembers its video in a KV cache").first).to_be_visible()
    screenshot("help")


def test_help_pages_are_served(server):
    for kind in {node["type"] for node in WORKFLOW["nodes"] if node["type"].startswith("QuantWM")}:
        answer = server.get(f"/extensions/quantwm/docs/{kind}.md")
        assert answer.ok and answer.text.startswith("# "), kind

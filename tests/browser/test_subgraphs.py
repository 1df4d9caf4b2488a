"""Blueprints come from the search box, show their widgets, and run; the panel sees a cache inside of a subgraph."""

from __future__ import annotations

import json

from playwright.sync_api import Locator, Page, expect

from scripts.make_blueprints import BLUEPRINTS

RUN_MS = 180_000
SEARCHES = 30


def test_server_lists_them(server):
    entries = server.json("/global_subgraphs")
    ours = {key: entry for key, entry in entries.items() if entry["info"]["node_pack"] == "custom_nodes.quantwm"}
    assert {entry["name"] for entry in ours.values()} == {blueprint.title for blueprint in BLUEPRINTS}
    known = server.object_info().keys()
    for key in ours:
        (definition,) = json.loads(server.json(f"/global_subgraphs/{key}")["data"])["definitions"]["subgraphs"]
        assert {node["type"] for node in definition["nodes"]} <= known


def search(page: Page, words: str, title: str) -> Locator:
    """The entry of that title in the search box. Blueprints arrive some time after the page, so ask again."""
    page.evaluate("app.extensionManager.command.execute('Workspace.SearchBox.Toggle')")
    entry = page.get_by_role("dialog").get_by_text(title, exact=True).first
    for _ in range(SEARCHES):
        page.get_by_role("dialog").get_by_role("combobox").first.fill("")
        page.keyboard.type(words)
        page.wait_for_timeout(500)
        if entry.is_visible():
            break
    return entry


def test_search_box_adds_them(page, screenshot):
    for blueprint in BLUEPRINTS:
        page.evaluate("app.graph.clear()")
        search(page, "2-bit memory", blueprint.title).click()
        # It hangs at the pointer until a click says where it goes.
        page.mouse.click(700, 400)
        page.wait_for_function("app.graph.nodes.length === 1")
        node = page.evaluate(
            """(({ title, subgraph, inputs, widgets }) => ({
                title, inside: subgraph.nodes.length, inputs: inputs.map(input => input.name),
                widgets: Object.fromEntries(widgets.map(widget => [widget.name, widget.value])),
            }))(app.graph.nodes[0])"""
        )
        assert node["title"] == blueprint.title and node["inside"] == len(blueprint.inside)
        assert node["inputs"] == [entry.name for entry in blueprint.inputs]
        assert node["widgets"].keys() == {entry.name for entry in blueprint.inputs if entry.value is not None}
        assert node["widgets"]["preset"] == "custom"
        screenshot(f"blueprint-{blueprint.template}")


def test_it_runs_and_the_panel_shows_its_cache(page, screenshot):
    page.evaluate("workflow => app.loadGraphData(workflow)", json.loads(BLUEPRINTS[0].path.read_text()))
    page.evaluate(
        """() => {
            const world = app.graph.nodes[0];
            const set = (name, value) => world.widgets.find(widget => widget.name === name).value = value;
            set("length", 24);
            set("preset", "best quality");
            const stats = LiteGraph.createNode("QuantWMCacheStats");
            stats.pos = [480, 0];
            app.graph.add(stats);
            world.connect(world.outputs.findIndex(output => output.name === "cache"), stats, 0);
            world.connect(world.outputs.findIndex(output => output.name === "frames"), stats, 1);
        }"""
    )
    page.get_by_test_id("queue-button").click()
    expect(page.locator(".quantwm-sampling")).to_be_visible(timeout=RUN_MS)
    expect(page.locator(".quantwm-finished")).to_be_visible(timeout=RUN_MS)
    state = page.evaluate("Object.values(app.nodeOutputs).find(output => output.quantwm_memory).quantwm_memory[0]")
    # The preset decides, although the widgets inside of the subgraph were never touched.
    assert (state["key_bits"], state["value_bits"], state["tokens"]) == (4, 4, 24 * 96)
    screenshot("blueprint-run")

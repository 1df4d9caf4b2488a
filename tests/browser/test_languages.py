"""Languages change what is read, never what is saved; settings are there, in words of the language."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Page, expect

from benchmarks.host import ROOT

WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
KIND = "QuantWMKVCache"
LOAD_AND_SAVE = "async workflow => (await app.loadGraphData(workflow), app.graph.serialize())"


def read(language: str, name: str) -> dict:
    return json.loads((ROOT / "locales" / language / name).read_text(encoding="utf-8"))


def saved(page: Page, workflow: dict) -> dict:
    """What the editor saves of a workflow that it has just loaded; where the view stood is no part of it."""
    page.evaluate("workflow => app.loadGraphData(workflow)", workflow)
    return serialized(page)


def serialized(page: Page) -> dict:
    """The graph as the editor saves it, in an order of its own: ComfyUI itself turns the inputs of a node that grows
    (Batch Images) at each load."""
    graph = page.evaluate("app.graph.serialize()")
    graph["extra"].pop("ds", None)
    names = {(node["id"], slot): entry["name"] for node in graph["nodes"] for slot, entry in enumerate(node["inputs"])}
    graph["links"] = [[*link[:4], names[link[3], link[4]], link[5]] for link in graph["links"]]
    for node in graph["nodes"]:
        node["inputs"].sort(key=lambda entry: entry["name"])
    return graph


def without_labels(graph: dict) -> dict:
    """The graph without what ComfyUI writes beside each socket for people: its name in the language of the moment."""
    if isinstance(graph, list):
        return [without_labels(entry) for entry in graph]
    if isinstance(graph, dict):
        return {name: without_labels(entry) for name, entry in graph.items() if name != "localized_name"}
    return graph


def prompt_of(page: Page) -> dict:
    """What would be run; `_meta` holds titles for people."""
    prompt = page.evaluate("app.graphToPrompt().then(prompt => prompt.output)")
    return {name: (node["class_type"], node["inputs"]) for name, node in prompt.items()}


def input_label(page: Page, name: str) -> str:
    return page.evaluate(
        """([kind, name]) => {
            const node = app.graph.nodes.find(node => node.type === kind);
            return node.widgets.find(widget => widget.name === name).label ?? name;
        }""",
        [KIND, name],
    )


def test_saved_workflows_are_the_same_in_all_languages(open_page):
    page = open_page({})
    files = [json.loads(path.read_text()) for path in WORKFLOWS]
    first = [saved(page, file) for file in files]
    for language in ("zh", "ja", "en"):
        # What one language has saved, the next one loads.
        files = [page.evaluate(LOAD_AND_SAVE, file) for file in files]
        page = open_page({"Comfy.Locale": language})
        graphs = [saved(page, file) for file in files]
        assert without_labels(graphs) == without_labels(first), language
        label = read(language, "nodeDefs.json")[KIND]["inputs"]["key_bits"]["name"]
        assert input_label(page, "key_bits") == label
    assert graphs == first


def test_switching_without_reloading_leaves_the_graph_alone(page, screenshot):
    first = saved(page, json.loads(WORKFLOWS[-1].read_text()))
    prompt = prompt_of(page)
    for language in ("zh", "en"):
        page.evaluate("language => app.extensionManager.setting.set('Comfy.Locale', language)", language)
        page.wait_for_timeout(1000)
        now = serialized(page)
        assert without_labels(now) == without_labels(first), language
        assert prompt_of(page) == prompt
        screenshot(f"language-{language}")
    assert now == first


@pytest.mark.parametrize("language", ["en", "zh", "ja"])
def test_settings_page(open_page, language):
    page = open_page({"Comfy.Locale": language})
    page.evaluate("app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
    page.get_by_role("dialog").get_by_text("QuantWM", exact=True).first.click()
    for entry in read(language, "settings.json").values():
        expect(page.get_by_role("dialog").get_by_text(entry["name"], exact=True)).to_be_visible()
    page.screenshot(path=ROOT / "out" / f"browser-settings-{language}.png")


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_panel_speaks_the_language(open_page, language):
    page = open_page({"Comfy.Locale": language})
    page.evaluate("app.graph.add(LiteGraph.createNode('QuantWMCacheStats'))")
    expect(page.locator(".quantwm-panel")).to_have_text(read(language, "main.json")["quantwm"]["empty"])

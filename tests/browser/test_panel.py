"""The panel on Cache Memory Stats, in both node renderers, light and dark: live, finished, stopped, switched off."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Page, expect

from benchmarks.host import ROOT

WORKFLOW = json.loads((ROOT / "workflows" / "tiny-world.json").read_text())
RUN_MS = 180_000
LEAST_CONTRAST = 4.5
LOOKS = [
    ("classic-dark", {}),
    ("classic-light", {"Comfy.ColorPalette": "light"}),
    ("nodes2-dark", {"Comfy.VueNodes.Enabled": True}),
    ("nodes2-light", {"Comfy.VueNodes.Enabled": True, "Comfy.ColorPalette": "light"}),
]

# Contrast (WCAG 2) of each text on the panel with what is painted behind it; colours are read back from a canvas,
# because the theme mixes them.
CONTRASTS = """root => {
    const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = color => {
        context.clearRect(0, 0, 1, 1);
        context.fillStyle = color;
        context.fillRect(0, 0, 1, 1);
        return [...context.getImageData(0, 0, 1, 1).data];
    };
    const luminance = rgb => {
        const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = element => {
        for (; element; element = element.parentElement) {
            const color = rgba(getComputedStyle(element).backgroundColor);
            if (color[3] === 255) return color;
        }
    };
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    const found = [];
    while (walker.nextNode()) {
        const text = walker.currentNode;
        if (!text.data.trim()) continue;
        const [a, b] = [rgba(getComputedStyle(text.parentElement).color), behind(text.parentElement)]
            .map(color => luminance(color.slice(0, 3))).sort((x, y) => y - x);
        found.push([text.data, (a + 0.05) / (b + 0.05)]);
    }
    return found;
}"""


def start_run(page: Page, length: int = 12, seed: int = 0, **widgets: object) -> None:
    """Open the tiny world's template, make it short, and press Run. States that arrive are kept in `states`."""
    page.evaluate("workflow => app.loadGraphData(workflow)", WORKFLOW)
    page.evaluate(
        """values => {
            for (const node of app.graph.nodes) for (const widget of node.widgets ?? [])
                if (widget.name in values) widget.value = values[widget.name];
            window.states = [];
            app.api.addEventListener("quantwm.memory", event => states.push([performance.now(), event.detail]));
        }""",
        {"seed_frames": 6, "length": length, "noise_seed": seed, **widgets},
    )
    page.get_by_test_id("queue-button").click()


def has_chart_image(page: Page) -> bool:
    return page.evaluate("!!app.graph.nodes.find(node => node.type === 'QuantWMCacheStats').imgs?.length")


@pytest.mark.parametrize(("name", "settings"), LOOKS, ids=[name for name, _ in LOOKS])
def test_panel_is_live_and_stays(page, screenshot, name, settings):
    start_run(page, length=24, seed=LOOKS.index((name, settings)) + 1)
    panel = page.locator(".quantwm-panel")
    expect(panel.locator(".quantwm-sampling")).to_be_visible(timeout=RUN_MS)
    page.wait_for_function("states.length > 2", timeout=RUN_MS)
    screenshot(f"panel-{name}-live")
    expect(panel.locator(".quantwm-finished")).to_be_visible(timeout=RUN_MS)

    final = page.evaluate("Object.values(app.nodeOutputs).find(output => output.quantwm_memory).quantwm_memory[0]")
    ratio = final["bytes_bf16"] / (final["bytes_packed"] + final["bytes_unpacked"])
    expect(panel.locator(".quantwm-ratio")).to_have_text(f"{ratio:.1f}\u00d7")
    expect(panel).to_contain_text(f"finished, {final['blocks']} blocks")
    memory = "Memory" if final["memory"]["cpu"] else "Graphics memory"
    named = ("smaller than BF16", "codes", "Encoding", "Decoding", "Backend", memory)
    for words in (*named, final["backend"], final["backend_reason"]):
        expect(panel).to_contain_text(words)
    points = panel.locator("polyline.quantwm-kept").get_attribute("points").split()
    assert len(points) == final["blocks"] + 1

    times = page.evaluate("states.map(([time]) => time)")
    assert len(times) > 2 and times[-1] - times[0] > 230 * (len(times) - 1)
    panel_box, node_width = panel.bounding_box(), 540
    scale = page.evaluate("app.canvas.ds.scale")
    assert 0.8 * node_width * scale < panel_box["width"] <= node_width * scale + 1
    overflow = panel.evaluate(
        "panel => [panel.scrollWidth - panel.clientWidth, panel.scrollHeight - panel.clientHeight]"
    )
    assert max(overflow) <= 1, "the panel does not fit into its node"
    low = [each for each in panel.evaluate(CONTRASTS) if each[1] < LEAST_CONTRAST]
    assert not low
    assert not has_chart_image(page), "the chart would be drawn twice"
    screenshot(f"panel-{name}")


def test_an_interrupted_run_stops_being_live(page):
    start_run(page, length=36, seed=11)
    expect(page.locator(".quantwm-sampling")).to_be_visible(timeout=RUN_MS)
    page.evaluate("app.api.interrupt(null)")
    expect(page.locator(".quantwm-stopped")).to_be_visible(timeout=RUN_MS)


def test_comfyuis_own_cache_is_shown_at_the_end(page):
    start_run(page, seed=12, method="off")
    panel = page.locator(".quantwm-panel")
    expect(panel.locator(".quantwm-finished")).to_have_text("finished", timeout=RUN_MS)
    expect(panel).to_contain_text("not packed")
    expect(panel.locator("svg")).to_have_count(0)


def test_the_chart_is_there_after_another_tab(page):
    start_run(page, seed=13)
    expect(page.locator(".quantwm-finished")).to_be_visible(timeout=RUN_MS)
    words = page.locator(".quantwm-panel").inner_text()
    page.evaluate("app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    expect(page.locator(".quantwm-panel")).to_have_count(0)
    page.get_by_text("Unsaved Workflow (2)").first.click()
    expect(page.locator(".quantwm-panel")).to_have_text(words, use_inner_text=True)


def test_panel_is_not_saved(page):
    page.evaluate("workflow => app.loadGraphData(workflow)", WORKFLOW)
    saved = page.evaluate("app.graph.serialize().nodes.find(node => node.type === 'QuantWMCacheStats')")
    assert not saved.get("widgets_values")
    prompt = page.evaluate("app.graphToPrompt().then(prompt => prompt.output)")
    (inputs,) = (node["inputs"] for node in prompt.values() if node["class_type"] == "QuantWMCacheStats")
    assert inputs.keys() == {"cache", "after"}


class TestOff:
    @pytest.fixture
    def settings(self) -> dict:
        return {"QuantWM.LivePanel": False}

    def test_text_and_chart_take_its_place(self, page, screenshot):
        start_run(page, seed=21)
        page.wait_for_function(
            "app.graph.nodes.find(node => node.type === 'QuantWMCacheStats').imgs?.length", timeout=RUN_MS
        )
        assert page.evaluate("states.length") == 0
        expect(page.locator(".quantwm-panel")).to_have_count(0)
        expect(page.get_by_text("smaller than BF16:").first).to_be_visible()
        screenshot("panel-off")

    def test_the_setting_works_at_once(self, page):
        page.evaluate("workflow => app.loadGraphData(workflow)", WORKFLOW)
        for on in (True, False):
            page.evaluate("on => app.extensionManager.setting.set('QuantWM.LivePanel', on)", on)
            expect(page.locator(".quantwm-panel")).to_have_count(int(on))

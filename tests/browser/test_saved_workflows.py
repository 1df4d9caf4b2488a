"""Workflows saved by the first version load with the same values in every later one."""

import json
from pathlib import Path

from playwright.sync_api import expect

SAVED = json.loads(Path(__file__).with_name("saved_v1.json").read_text())

# By name: what version 0.1.0 meant by the positions in saved_v1.json. Never edit either.
VALUES = {
    "QuantWMKVCache": {
        "method": "quantwm-paper",
        "key_bits": "4",
        "value_bits": "8",
        "group_size": 32,
        "centroids": 128,
        "candidates": 2,
        "rank": 6,
        "span_blocks": 3,
        "keep_first_blocks": 1,
        "keep_recent_blocks": 2,
        "cache_device": "cpu",
        "backend": "torch",
    },
    "QuantWMLoadWorldModel": {"model_name": "tiny world (built in)", "weight_dtype": "fp8_e5m2"},
    "QuantWMTinyWorldConditioning": {"turn_rate": -15.5, "orbit": 0.3, "orbit_phase": 90},
    "QuantWMTinyWorldSeed": {
        "world_seed": 1234,
        "turn_rate": -15.5,
        "orbit": 0.3,
        "orbit_phase": 90,
        "seed_frames": 9,
        "length": 48,
    },
}


def values_by_name(page) -> dict:
    return page.evaluate(
        """() => Object.fromEntries(app.graph.nodes.filter(node => node.widgets?.length).map(
            node => [node.type, Object.fromEntries(node.widgets.filter(
                w => w.serialize !== false).map(w => [w.name, w.value]))]))"""
    )


def test_first_version_keeps_its_values(page):
    page.evaluate("workflow => app.loadGraphData(workflow)", SAVED)
    loaded = values_by_name(page)
    assert {kind: {name: loaded[kind][name] for name in VALUES[kind]} for kind in VALUES} == VALUES
    # Inputs that came later stand at what changes nothing.
    later = {"jensen": "off", "bit_overrides": "", "preset": "custom"}
    assert later.items() <= loaded["QuantWMKVCache"].items()
    page.evaluate("app.loadGraphData(app.graph.serialize())")
    assert values_by_name(page) == loaded


def test_unknown_choice_becomes_the_default_and_says_so(page):
    workflow = json.loads(json.dumps(SAVED))
    workflow["nodes"][0]["widgets_values"][:3] = ["from-the-future", "3", "8"]
    page.evaluate("workflow => app.loadGraphData(workflow)", workflow)
    loaded = values_by_name(page)["QuantWMKVCache"]
    assert [loaded[name] for name in ("method", "key_bits", "value_bits")] == ["quantwm", "2", "8"]
    expect(page.get_by_text('method was "from-the-future"')).to_be_visible()
    expect(page.get_by_text('key_bits was "3"')).to_be_visible()

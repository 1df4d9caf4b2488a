"""The pack in a real ComfyUI server: what loads, what is served, and runs through the HTTP API."""

from __future__ import annotations

import pytest
import requests
import torch

from benchmarks.demo import node_of, record_in
from support.prompts import TEMPLATE, tiny_world_prompt, with_world_sampler, without_cache_nodes
from support.server import ComfyServer, PromptFailed

NODE_IDS = {
    "QuantWMKVCache",
    "QuantWMApply",
    "QuantWMCacheStats",
    "QuantWMLoadWorldModel",
    "QuantWMLongCatConditioning",
    "QuantWMLongCatLoRA",
    "QuantWMLongCatScheduler",
    "QuantWMTinyWorldVAE",
    "QuantWMTinyWorldConditioning",
    "QuantWMTinyWorldSeed",
    "QuantWMCompare",
    "QuantWMCameraPath",
    "QuantWMLingBotConditioning",
    "QuantWMWorldSampler",
    "QuantWMPromptChange",
    "QuantWMMemory",
    "QuantWMPlanner",
    "QuantWMBudget",
}


@pytest.fixture(scope="module")
def prompt(server) -> dict:
    return tiny_world_prompt(server.object_info())


def registered(server: ComfyServer) -> dict:
    return {name: info for name, info in server.object_info().items() if name.startswith("QuantWM")}


def forget(server: ComfyServer) -> None:
    """Make the server drop its models and the outputs it would reuse."""
    body = {"unload_models": True, "free_memory": True}
    requests.post(server.url + "/free", json=body, timeout=60).raise_for_status()


def interrupt_at(server: ComfyServer, prompt: dict, kind: str, count: int) -> PromptFailed:
    """Queue a prompt, interrupt it at the sampler's `count`-th event of a kind, and return the error."""
    sampler = node_of(prompt, "SamplerCustomAdvanced")
    seen = 0

    def from_sampler(data: dict) -> bool:
        if kind == "progress_text":
            return data["node"] == sampler
        return data["nodes"].get(sampler, {"value": 0})["value"] > 0

    def on_progress(event: dict) -> None:
        nonlocal seen
        if event["type"] == kind and from_sampler(event["data"]):
            seen += 1
            if seen == count:
                server.interrupt()

    with pytest.raises(PromptFailed) as failure:
        server.wait(server.queue(prompt), on_progress)
    return failure.value


def test_all_nodes_are_registered(server):
    nodes = registered(server)
    assert set(nodes) == NODE_IDS
    assert {info["category"] for info in nodes.values()} == {"QuantWM"}
    assert "IMPORT FAILED" not in server.log()


def test_every_input_has_a_tooltip(server):
    for name, info in registered(server).items():
        inputs = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
        assert info["description"] and info["display_name"]
        assert not [key for key, value in inputs.items() if not value[1].get("tooltip")], name


def test_templates_are_listed_and_served(server):
    names = server.json("/workflow_templates")["quantwm"]
    assert TEMPLATE in names
    for name in names:
        workflow = server.json(f"/api/workflow_templates/quantwm/{name}.json")
        assert workflow["nodes"]
        thumbnail = server.get(f"/api/workflow_templates/quantwm/{name}.jpg")
        assert thumbnail.status_code == 200 and thumbnail.content[:2] == b"\xff\xd8"


def test_help_pages_are_served(server):
    for name in NODE_IDS:
        pages = (f"/extensions/quantwm/docs/{name}/en.md", f"/extensions/quantwm/docs/{name}.md")
        assert any(server.get(page).status_code == 200 for page in pages), name


@pytest.mark.parametrize("method", ["quantwm", "quantwm-paper"])
def test_run_in_two_bits_reports_what_it_saved(server, prompt, method):
    prompt = tiny_world_prompt(server.object_info(), method=method, key_bits="2", value_bits="2")
    events = []
    entry = server.wait(server.queue(prompt), events.append)
    stats = entry["outputs"][node_of(prompt, "QuantWMCacheStats")]
    record = record_in("\n".join(stats["text"]))
    assert record["method"] == method and record["key_bits"] == record["value_bits"] == 2
    assert record["tokens"] == 12 * 96
    assert record["ratio_packed"] > 4
    assert server.file(stats["images"][0])[:4] == b"\x89PNG"
    texts = [event["data"]["text"] for event in events if event["type"] == "progress_text"]
    assert [text for text in texts if "tokens cached" in text], "no progress text while sampling"


def test_off_equals_a_graph_without_the_nodes(server, sample):
    off = tiny_world_prompt(server.object_info(), method="off", noise_seed=3)
    packed = tiny_world_prompt(server.object_info(), method="quantwm", noise_seed=3)
    latents = [sample(server, each) for each in (off, packed, without_cache_nodes(off))]
    assert torch.equal(latents[0], latents[2])
    assert not torch.equal(latents[0], latents[1])


def test_world_sampler_equals_the_hosts_until_it_is_asked_for_more(server, prompt, sample):
    assert torch.equal(sample(server, with_world_sampler(prompt)), sample(server, prompt))
    asked = with_world_sampler(prompt, window=3, prompts=["change", 0], memory=["memory", 0])
    asked["memory"] = {
        "class_type": "QuantWMMemory",
        "inputs": {"retrieval": "camera", "blocks": 1, "bank_blocks": 0, "keep": 1.0, "bank_device": "cpu"},
    }
    asked["turn"] = {
        "class_type": "QuantWMTinyWorldConditioning",
        "inputs": {"turn_rate": -18.0, "orbit": 0.2, "orbit_phase": 0.0},
    }
    asked["change"] = {
        "class_type": "QuantWMPromptChange",
        "inputs": {"conditioning": ["turn", 0], "from_block": 2},
    }
    events = []
    entry = server.wait(server.queue(asked), events.append)
    record = record_in("\n".join(entry["outputs"][node_of(asked, "QuantWMCacheStats")]["text"]))
    assert record["tokens"] == 12 * 96 and record["blocks"] == 4 and record["blocks_in_bank"] == 3
    told = [(e["data"]["node"], e["data"]["text"]) for e in events if e["type"] == "progress_text"]
    assert (node_of(asked, "QuantWMWorldSampler"), "Block 2 of 2: 12 of 12 latent frames") in [
        (node, text.splitlines()[0].strip()) for node, text in told
    ]
    states = [e["data"]["nodes"] for e in events if e["type"] == "progress_state"]
    sampler = node_of(asked, "SamplerCustomAdvanced")
    assert max(nodes[sampler]["max"] for nodes in states if sampler in nodes) == 2 * 5


def test_settings_from_the_planner_are_what_the_run_uses(server, prompt):
    planned, apply = dict(prompt), node_of(prompt, "QuantWMApply")
    # 36 latent frames of 96 tokens need 20.25 MiB in BF16, and packed less than 19 even where all else is float32.
    size = {"width": 192, "height": 128, "length": 141, "frames_per_block": 3}
    model = [node_of(prompt, "QuantWMLoadWorldModel"), 0]
    planned["plan"] = {"class_type": "QuantWMPlanner", "inputs": {"model": model, **size, "budget": 0.0185}}
    planned[apply] = prompt[apply] | {"inputs": prompt[apply]["inputs"] | {"settings": ["plan", 0]}}
    entry = server.wait(server.queue(planned))
    report = "".join(entry["outputs"]["plan"]["text"])
    assert server.file(entry["outputs"]["plan"]["images"][0])[:4] == b"\x89PNG"
    record = record_in("\n".join(entry["outputs"][node_of(prompt, "QuantWMCacheStats")]["text"]))
    assert "36 latent frames x 96 tokens, blocks of 3" in report and record["method"] == "quantwm"
    bits = f"keys {record['key_bits']} bit, values {record['value_bits']} bit"
    assert f"best picture that fits: quantwm, {bits}: cache" in report


@pytest.mark.parametrize(
    ("kind", "count"),
    [pytest.param("progress_state", 1, id="in a step"), pytest.param("progress_text", 2, id="after a block")],
)
def test_run_after_an_interrupt_equals_a_fresh_run(server, sample, kind, count):
    prompt = tiny_world_prompt(server.object_info(), noise_seed=100 + count, length=18)
    assert interrupt_at(server, prompt, kind, count).interrupted
    after = sample(server, prompt)
    forget(server)
    assert torch.equal(after, sample(server, prompt))


def test_wrong_number_of_frames_is_refused_before_anything_runs(server):
    prompt = tiny_world_prompt(server.object_info(), seed_frames=12, length=12)
    with pytest.raises(PromptFailed, match="seed_frames"):
        server.queue(prompt)


def test_pack_works_without_triton(server_without_triton, server, prompt, sample):
    assert set(registered(server_without_triton)) == NODE_IDS
    assert "IMPORT FAILED" not in server_without_triton.log()
    assert server_without_triton.log().count("PyTorch does the work of the GPU kernels") == 1
    assert torch.equal(sample(server_without_triton, prompt), sample(server, prompt))
    entry = next(iter(server_without_triton.json("/history").values()))
    record = record_in(entry["outputs"][node_of(prompt, "QuantWMCacheStats")]["text"][0])
    assert record["backend"] == "torch"

"""What saved workflows depend on: ids, input names and their order may only ever be added to."""

import asyncio
import importlib

import pytest

from benchmarks.host import ROOT

pytestmark = pytest.mark.host

CAMERA = ["turn_rate", "orbit", "orbit_phase"]

# Saved values are matched to widgets by position: never rename, reorder or insert here, only append.
INPUTS = {
    "QuantWMKVCache": [
        "method",
        "key_bits",
        "value_bits",
        "group_size",
        "centroids",
        "candidates",
        "rank",
        "span_blocks",
        "keep_first_blocks",
        "keep_recent_blocks",
        "cache_device",
        "backend",
        "jensen",
        "bit_overrides",
        "preset",
    ],
    "QuantWMApply": ["model", "settings"],
    "QuantWMCacheStats": ["cache", "after"],
    "QuantWMLoadWorldModel": ["model_name", "weight_dtype"],
    "QuantWMTinyWorldVAE": [],
    "QuantWMTinyWorldConditioning": CAMERA,
    "QuantWMTinyWorldSeed": ["model", "vae", "world_seed", *CAMERA, "seed_frames", "length"],
    "QuantWMCompare": ["reference", "compared", "difference_gain", "reference_name", "compared_name"],
    "QuantWMWorldSampler": ["frames_per_block", "window", "sink", "context_noise", "prompts", "memory", "solver"],
    "QuantWMMemory": ["retrieval", "blocks", "bank_blocks", "keep", "bank_device"],
    "QuantWMPromptChange": ["conditioning", "from_block", "earlier"],
}
INPUTS |= {
    "QuantWMLongCatConditioning": [
        "positive",
        "negative",
        "vae",
        "width",
        "height",
        "length",
        "given_frames",
        "start_image",
        "video",
    ],
    "QuantWMLongCatLoRA": ["model", "lora_name", "strength"],
    "QuantWMLongCatScheduler": ["model", "schedule", "steps"],
    "QuantWMBudget": ["settings", "budget_gb"],
    "QuantWMCameraPath": ["motion", "length", "distance", "angle", "fov", "actions", "keyframes", "folder"],
    "QuantWMLingBotConditioning": [
        "positive",
        "vae",
        "start_image",
        "camera",
        "version",
        "width",
        "height",
        "window",
        "sink",
        "negative",
    ],
    "QuantWMPlanner": ["model", "width", "height", "length", "frames_per_block", "budget", "guidance"],
}
OUTPUTS = {
    "QuantWMKVCache": ["QUANTWM_SETTINGS"],
    "QuantWMApply": ["MODEL", "QUANTWM_CACHE"],
    "QuantWMCacheStats": ["STRING", "IMAGE"],
    "QuantWMLoadWorldModel": ["MODEL"],
    "QuantWMTinyWorldVAE": ["VAE"],
    "QuantWMTinyWorldConditioning": ["CONDITIONING"],
    "QuantWMTinyWorldSeed": ["MODEL", "LATENT", "IMAGE"],
    "QuantWMCompare": ["STRING", "IMAGE", "IMAGE", "FLOAT", "FLOAT"],
    "QuantWMWorldSampler": ["SAMPLER"],
    "QuantWMPromptChange": ["QUANTWM_PROMPTS"],
    "QuantWMMemory": ["QUANTWM_MEMORY"],
}
OUTPUTS |= {
    "QuantWMLongCatConditioning": ["CONDITIONING", "CONDITIONING", "LATENT", "INT"],
    "QuantWMLongCatLoRA": ["MODEL"],
    "QuantWMLongCatScheduler": ["SIGMAS"],
    "QuantWMBudget": ["QUANTWM_SETTINGS"],
    "QuantWMCameraPath": ["QUANTWM_CAMERA", "IMAGE"],
    "QuantWMLingBotConditioning": ["CONDITIONING", "LATENT", "SIGMAS", "INT", "CONDITIONING"],
    "QuantWMPlanner": ["QUANTWM_SETTINGS", "STRING", "IMAGE"],
}
NAMES = {
    "QuantWMKVCache": "QuantWM KV Cache",
    "QuantWMApply": "Apply To World Model",
    "QuantWMCacheStats": "Cache Memory Stats",
    "QuantWMLoadWorldModel": "Load World Model",
    "QuantWMTinyWorldVAE": "Tiny World VAE",
    "QuantWMTinyWorldConditioning": "Tiny World Conditioning",
    "QuantWMTinyWorldSeed": "Tiny World Seed",
    "QuantWMCompare": "Compare Worlds",
    "QuantWMWorldSampler": "World Sampler",
    "QuantWMPromptChange": "Prompt Change",
    "QuantWMMemory": "World Memory",
}
NAMES |= {
    "QuantWMLongCatConditioning": "LongCat Conditioning",
    "QuantWMLongCatLoRA": "LongCat LoRA",
    "QuantWMLongCatScheduler": "LongCat Scheduler",
    "QuantWMBudget": "Cache Budget",
    "QuantWMCameraPath": "Camera Path",
    "QuantWMLingBotConditioning": "LingBot Conditioning",
    "QuantWMPlanner": "Memory Planner",
}
KV_CACHE_DEFAULTS = ["quantwm", "2", "2", 64, 0, 0, 0, 0, 0, 0, "gpu", "auto", "off", "", "custom"]
ADVANCED = {
    "QuantWMKVCache": INPUTS["QuantWMKVCache"][3:-1],
    "QuantWMLoadWorldModel": ["weight_dtype"],
    "QuantWMWorldSampler": ["context_noise", "solver"],
    "QuantWMLingBotConditioning": ["window", "sink"],
    "QuantWMMemory": ["bank_device"],
}


@pytest.fixture(scope="module")
def schemas(host):
    nodes = importlib.import_module("quantwm_pack.nodes")
    extension = asyncio.run(nodes.comfy_entrypoint())
    return {node.GET_SCHEMA().node_id: node.GET_SCHEMA() for node in asyncio.run(extension.get_node_list())}


def test_ids_inputs_and_outputs_are_frozen(schemas):
    assert {key: [entry.id for entry in schema.inputs] for key, schema in schemas.items()} == INPUTS
    assert {key: [entry.io_type for entry in schema.outputs] for key, schema in schemas.items()} == OUTPUTS
    assert {key: schema.display_name for key, schema in schemas.items()} == NAMES


def test_kv_cache_values(schemas):
    by_id = {entry.id: entry for entry in schemas["QuantWMKVCache"].inputs}
    assert [entry.default for entry in by_id.values()] == KV_CACHE_DEFAULTS
    first = ["quantwm", "off", "quantwm-paper", "rtn", "kivi", "qvg", "qvg-pro", "quarot"]
    assert by_id["method"].options[: len(first)] == first
    assert by_id["key_bits"].options == by_id["value_bits"].options == ["2", "4", "8", "16"]
    assert by_id["cache_device"].options == ["gpu", "cpu"]
    assert by_id["backend"].options == ["auto", "triton", "torch"]
    assert by_id["jensen"].options == ["off", "exact", "second-order"]
    assert by_id["preset"].options == ["balanced", "smallest", "best quality", "paper", "custom"]


def test_optional_inputs_come_last(schemas):
    """The editor lists them behind the required ones: in between, they would shift saved values."""
    for key, schema in schemas.items():
        optional = [entry.optional for entry in schema.inputs]
        assert optional == sorted(optional), key


def test_stats_take_a_latent_or_an_image(schemas):
    after = schemas["QuantWMCacheStats"].inputs[1]
    assert after.get_io_type() == "LATENT,IMAGE" and after.optional
    assert schemas["QuantWMCacheStats"].is_output_node


def test_words_for_the_person_at_the_screen(schemas):
    for key, schema in schemas.items():
        assert schema.category == "QuantWM" and schema.description and len(schema.search_aliases) >= 3, key
        assert all(entry.tooltip for entry in [*schema.inputs, *schema.outputs]), key
        advanced = [entry.id for entry in schema.inputs if entry.advanced]
        assert advanced == ADVANCED.get(key, []), key


def test_help_pages_name_every_input(schemas):
    pages = {path.stem: path.read_text() for path in (ROOT / "web" / "docs").glob("*.md")}
    assert pages.keys() == schemas.keys()
    for key, schema in schemas.items():
        assert pages[key].startswith(f"# {schema.display_name}\n")
        missing = [entry.id for entry in schema.inputs if f"**{entry.id}**" not in pages[key]]
        assert not missing, f"{key}: {missing}"

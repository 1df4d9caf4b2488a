"""What the nodes do when ComfyUI runs them: settings, refusals, progress, report and chart."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.host

ENTRY = {
    "block": 4,
    "tokens": 1440,
    "bytes_bf16": 8_847_360,
    "bytes_packed": 1_400_000,
    "bytes_unpacked": 4_000,
    "seconds": 0.1,
}


@pytest.fixture
def node(host):
    return lambda module, name: getattr(importlib.import_module(f"quantwm_pack.nodes.{module}"), name)


@pytest.fixture
def sent(monkeypatch):
    """(node id, text) of everything sent to a stand-in for ComfyUI's server."""
    messages = []
    instance = SimpleNamespace(send_progress_text=lambda text, node_id: messages.append((node_id, text)))
    monkeypatch.setitem(sys.modules, "server", SimpleNamespace(PromptServer=SimpleNamespace(instance=instance)))
    return messages


def test_kv_cache_makes_settings(node):
    chosen = {"method": "quantwm", "key_bits": "4", "value_bits": "2", "group_size": 32, "rank": 8}
    (settings,) = node("kv_cache", "QuantWMKVCache").execute(**chosen).args
    assert (settings.key_bits, settings.value_bits, settings.group_size, settings.rank) == (4, 2, 32, 8)
    assert settings == type(settings)(key_bits=4, group_size=32, rank=8)
    # Prompts saved before an input was added go without it.
    (later,) = node("kv_cache", "QuantWMKVCache").execute(**chosen, jensen="exact").args
    assert (settings.jensen, later.jensen) == ("off", "exact")


def test_a_preset_decides_over_the_other_inputs(node):
    execute = node("kv_cache", "QuantWMKVCache").execute
    (settings,) = execute(key_bits="8", value_bits="8", method="kivi", backend="torch", preset="best quality").args
    assert (settings.method, settings.key_bits, settings.value_bits, settings.backend) == ("quantwm", 4, 4, "torch")
    (settings,) = execute(key_bits="8", value_bits="8", method="kivi", preset="custom").args
    assert (settings.method, settings.key_bits) == ("kivi", 8)


def test_a_page_gets_presets_as_its_widgets_hold_them(node):
    inputs = {entry.id: entry for entry in node("kv_cache", "QuantWMKVCache").define_schema().inputs}
    for values in inputs["preset"].as_dict()["presets"].values():
        for name, value in values.items():
            options = getattr(inputs[name], "options", None)
            assert value in options if options else type(value) is type(inputs[name].default), name


def test_kv_cache_refuses_a_group_size_on_the_node(node):
    kv_cache = node("kv_cache", "QuantWMKVCache")
    assert kv_cache.validate_inputs(group_size=64) is True
    message = kv_cache.validate_inputs(group_size=40)
    assert "group_size" in message and "40" in message and "64" in message
    with pytest.raises(ValueError, match="group_size"):
        kv_cache.execute(key_bits="2", value_bits="2", group_size=40)


def test_apply_shows_progress_on_both_nodes(node, sent, monkeypatch):
    apply = importlib.import_module("quantwm_pack.nodes.apply")
    context = importlib.import_module("comfy_execution.utils").CurrentNodeContext
    attached = {}

    def attach(model, settings, on_block):
        attached["on_block"] = on_block
        return f"patched {model}", "handle"

    monkeypatch.setattr(apply.world_models, "attach", attach)
    monkeypatch.setattr(apply.QuantWMApply, "hidden", SimpleNamespace(unique_id="4"))
    assert apply.QuantWMApply.execute("model", "settings").args == ("patched model", "handle")
    with context(prompt_id="p", node_id="16"):
        attached["on_block"](ENTRY)
    assert [node_id for node_id, _ in sent] == ["16", "4"]
    assert sent[0][1] == ("Block 5: 1,440 tokens cached  \n1.34 MiB instead of 8.44 MiB  \n6.3x smaller than BF16")


def test_progress_without_a_server(node, monkeypatch):
    monkeypatch.delitem(sys.modules, "server", raising=False)
    show_text = node("progress", "show_text")
    show_text("nobody listens", node("progress", "executing_node_id")(), "4")


def test_stats_before_any_run(node, sent, monkeypatch, tmp_path):
    folder_paths = importlib.import_module("folder_paths")
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path))
    stats = node("cache_stats", "QuantWMCacheStats")
    core = importlib.import_module("quantwm_pack.quantwm_core")
    monkeypatch.setattr(stats, "hidden", SimpleNamespace(unique_id="20", prompt=None, extra_pnginfo=None))
    result = stats.execute(core.CacheHandle(core.CacheSettings()))
    report, chart = result.args
    assert "after" in report and sent == [("20", report)]
    assert chart.shape == (1, 640, 1280, 3) and chart.dtype == torch.float32
    assert result.ui["text"] == (report,) and (tmp_path / result.ui["images"][0]["filename"]).is_file()


def test_load_world_model_lists_the_built_in_world_first(node):
    schema = node("load_world_model", "QuantWMLoadWorldModel").define_schema()
    assert schema.inputs[0].options[0] == "tiny world (built in)"
    model = node("load_world_model", "QuantWMLoadWorldModel").execute("tiny world (built in)", "default").args[0]
    assert hasattr(model.model.diffusion_model, "init_kv_caches")


def test_world_sampler_is_a_sampler_and_tells_how_far_it_is(node, sent, monkeypatch):
    world_sampler = node("world_sampler", "QuantWMWorldSampler")
    monkeypatch.setattr(world_sampler, "hidden", SimpleNamespace(unique_id="7"))
    (sampler,) = world_sampler.execute(frames_per_block=3, window=9, sink=3, context_noise=0.0).args
    samplers = importlib.import_module("comfy.samplers")
    assert isinstance(sampler, samplers.Sampler) and sampler.settings.sink == 3 and sampler.prompts == ()
    sampler.on_block({"block": 2, "blocks": 5, "done": 6, "frames": 15, "in_reach": 6})
    sampler.on_block({"block": 5, "blocks": 5, "done": 15, "frames": 15, "in_reach": 12})
    assert sent == [
        ("7", "Block 2 of 5: 6 of 15 latent frames  \nThe next block looks back at all of them"),
        ("7", "Block 5 of 5: 15 of 15 latent frames  \nThe next block looks back at 12 of them"),
    ]


def test_world_sampler_refuses_a_window_smaller_than_a_block_on_the_node(node):
    world_sampler = node("world_sampler", "QuantWMWorldSampler")
    assert world_sampler.validate_inputs(window=3, frames_per_block=3) is True
    assert world_sampler.validate_inputs(window=0, frames_per_block=3) is True
    assert world_sampler.validate_inputs(window=None, frames_per_block=None) is True
    assert "Raise window" in world_sampler.validate_inputs(window=2, frames_per_block=3)
    assert "from 1 to 64" in world_sampler.validate_inputs(window=0, frames_per_block=65)


def test_prompt_changes_chain_and_may_not_collide(node):
    prompt_change = node("prompt_change", "QuantWMPromptChange")
    (first,) = prompt_change.execute("sunset", 4).args
    (both,) = prompt_change.execute("night", 2, first).args
    assert [(change.block, change.conditioning) for change in both] == [(4, "sunset"), (2, "night")]
    with pytest.raises(ValueError, match="4 is given twice"):
        prompt_change.execute("noon", 4, both)


def test_world_memory_makes_settings_for_the_sampler(node):
    (memory,) = node("memory", "QuantWMMemory").execute(retrieval="camera", blocks=4, keep=0.5).args
    sampler = node("world_sampler", "QuantWMWorldSampler")
    chosen = {"frames_per_block": 3, "sink": 0, "context_noise": 0.0}
    assert sampler.execute(window=9, memory=memory, **chosen).args[0].memory == memory
    with pytest.raises(ValueError, match="Set window in World Sampler"):
        sampler.execute(window=0, memory=memory, **chosen)


def test_the_tiny_worlds_prompt_says_how_the_camera_moves(node):
    (conditioning,) = node("tiny_world_conditioning", "TinyWorldConditioning").execute(18.0, 0.2, 30.0).args
    assert conditioning[0][1] == {"camera_motion": (18.0, 0.2, 30.0)}


def test_cache_budget_adds_a_size_to_the_settings(node):
    kv_cache, budget = node("kv_cache", "QuantWMKVCache"), node("budget", "QuantWMBudget")
    defaults = {entry.id: entry.default for entry in kv_cache.define_schema().inputs}
    (settings,) = kv_cache.execute(**defaults).args
    (limited,) = budget.execute(settings, 1.5).args
    assert limited.budget_bytes == 3 * 2**29 and limited.in_width((2, 2)).method == settings.method
    (mixed,) = kv_cache.execute(**defaults | {"bit_overrides": "0=4"}).args
    with pytest.raises(ValueError, match="take out Cache Budget"):
        budget.execute(mixed, 1.5)

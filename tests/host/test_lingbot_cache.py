"""The packed cache on LingBot-World in the real host: equality, a window that rolls, lifetime, refusals."""

import importlib
from dataclasses import replace

import pytest
import torch

from support import lingbot_case as case
from support.lingbot_run import load_model, run

TOKENS = case.HEIGHT * case.WIDTH // 4
V2 = case.VERSIONS["v2"]
LONG = replace(V2, blocks=12, poses=4 * 48 - 3)


@pytest.fixture(scope="module")
def model(host):
    return load_model()


def patched(host, model, **settings):
    return host.world_models.attach(model, host.quantwm_core.CacheSettings(**settings))


@pytest.mark.parametrize("version", case.VERSIONS.values(), ids=case.VERSIONS)
@pytest.mark.parametrize("settings", [{"method": "off"}, {"key_bits": 16, "value_bits": 16}], ids=["off", "16/16"])
def test_off_equals_the_model_without_our_patch(host, model, version, settings):
    clone, handle = patched(host, model, **settings)
    assert torch.equal(run(clone, version), run(model, version))
    assert handle.record["tokens"] == TOKENS * (version.window or version.frames)


@pytest.mark.parametrize("method", ["quantwm", "rtn"])
def test_rolling_for_twelve_blocks(host, model, method):
    """The window is full from the second block on, and rolls through blocks; what is stored stops growing."""
    clone, handle = patched(host, model, method=method)
    assert run(clone, LONG).isfinite().all()
    assert [entry["tokens"] for entry in handle.history] == [4 * TOKENS] + [V2.window * TOKENS] * 11
    stored = [entry["bytes_packed"] for entry in handle.history]
    assert stored[-1] <= max(stored[2:6])
    assert handle.record["tokens"] == V2.window * TOKENS and handle.record["blocks"] == 12


@pytest.mark.parametrize("span_blocks", [2, 8])
def test_spans_longer_than_the_window_are_packed(host, model, span_blocks):
    """The window holds the sink and one block: a span waits for no more than that."""
    clone, handle = patched(host, model, method="rtn", span_blocks=span_blocks)
    assert run(clone, LONG).isfinite().all()
    assert handle.record["bytes_packed"] > 0 and handle.record["bytes_unpacked"] == 0
    assert handle.record["tokens"] == V2.window * TOKENS


def test_more_bits_come_closer_while_rolling(host, model):
    native = run(model, V2)
    errors = []
    for bits in (2, 4, 8):
        out = run(patched(host, model, key_bits=bits, value_bits=bits)[0], V2)
        errors.append(float((out - native).norm() / native.norm()))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 5e-3


def test_the_same_keys_are_in_reach_as_without_packing(host, model):
    """With blocks kept in full precision nothing is rounded: the packed cache has to roll exactly as the plain one."""
    clone, handle = patched(host, model, keep_first_blocks=12)
    torch.testing.assert_close(run(clone, V2), run(model, V2), rtol=1e-5, atol=1e-5)
    assert handle.record["bytes_packed"] == 0


def test_the_same_model_runs_again_cold(host, model):
    clone, _ = patched(host, model)
    first = run(clone, V2, seed=1)
    assert not torch.equal(run(clone, V2, seed=2), first)
    assert torch.equal(run(clone, V2, seed=1), first)


def test_the_world_sampler_gives_the_same(host, model):
    sampler = importlib.import_module("quantwm_pack.world_models.causal_wan.sampler")
    rollout = importlib.import_module("quantwm_pack.quantwm_core.window").RolloutSettings(V2.block)
    for each in (model, patched(host, model)[0]):
        assert torch.equal(run(each, V2, sampler=sampler.WorldSampler(rollout)), run(each, V2))


def test_the_world_sampler_may_not_have_a_window_of_its_own(host, model):
    sampler = importlib.import_module("quantwm_pack.world_models.causal_wan.sampler")
    rollout = importlib.import_module("quantwm_pack.quantwm_core.window").RolloutSettings(V2.block, window=8)
    with pytest.raises(ValueError, match="already gives a window of 7 .*Set World Sampler's window to 0"):
        run(model, V2, sampler=sampler.WorldSampler(rollout))


def test_lora_reaches_the_packed_model_in_either_order(host, model):
    """On a camera layer, which only this model has; same keys, an effect, the same result in both orders."""
    key = "diffusion_model.blocks.0.cam_scale_layer.weight"
    generator = torch.Generator().manual_seed(3)
    up, down = torch.randn(256, 4, generator=generator), torch.randn(4, 256, generator=generator)

    def with_lora(model):
        clone = model.clone()
        assert clone.add_patches({key: ("diff", (0.05 * up @ down,))}) == [key]
        return clone

    keys = set(model.model.state_dict())
    before, after = run(patched(host, with_lora(model))[0], V2), run(with_lora(patched(host, model)[0]), V2)
    assert torch.equal(before, after) and not torch.equal(before, run(patched(host, model)[0], V2))
    assert set(model.model.state_dict()) == keys


def test_a_run_after_an_interrupt_is_as_fresh(host, model):
    import comfy.model_management as management

    clone, _ = patched(host, model)
    fresh = run(clone, V2)

    def interrupt(step, *_):
        raise management.InterruptProcessingException()

    with pytest.raises(management.InterruptProcessingException):
        run(clone, V2, callback=interrupt)
    assert torch.equal(run(clone, V2), fresh)


def test_planned_memory_stops_at_the_window(host, model):
    adapter = importlib.import_module("quantwm_pack.world_models.causal_wan.adapter")
    lingbot = host.world_models.lingbot
    clone, _ = patched(host, model)
    made = adapter.CausalWanAdapter(host.quantwm_core.CacheSettings(), None, None, None)
    made.run = adapter.CausalWanRun(made.settings, model.model, made.handle, None, None, None)
    shape = [1, 16, 480, 60, 104]
    whole = made._with_cache(clone, list(shape), None)
    rolling = made._with_cache(clone, list(shape), lingbot.AttentionWindow(18, 6))
    assert whole[2] > rolling[2] >= shape[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_narrow_weights_do_not_narrow_the_cache(host, dtype):
    model = load_model(dtype=dtype)
    native = run(model, V2)
    off, handle = patched(host, model, method="off")
    assert torch.equal(run(off, V2), native)
    width = host.quantwm_core.CacheGeometry(case.MODEL["num_layers"], case.HEADS, 128).bytes_bf16(1)
    assert handle.record["bytes_unpacked"] >= V2.window * TOKENS * width
    assert run(patched(host, model)[0], V2).isfinite().all()


def test_causal_pretrain_keeps_a_cache_for_each_prompt(host, model):
    """R8 on LingBot-World: `off` is bit-equal, packed caches of both are counted, and both windows roll."""
    sampler = importlib.import_module("quantwm_pack.world_models.causal_wan.sampler")
    rollout = importlib.import_module("quantwm_pack.quantwm_core.window").RolloutSettings
    pretrain = replace(case.PRETRAIN, steps=6)

    def sample(each, version=pretrain, **changes):
        asked = {"sampler": sampler.WorldSampler(rollout(version.block, solver="unipc"))} | changes
        return run(each, version, **asked)

    native = sample(model)
    off, handle = patched(host, model, method="off")
    assert torch.equal(sample(off), native)
    assert handle.record["conditionings"] == 2 and handle.record["tokens"] == pretrain.frames * TOKENS
    packed, handle = patched(host, model)
    assert sample(packed).isfinite().all()
    both = handle.record["bytes_packed"]
    sample(packed, cfg=1.0)
    assert both == 2 * handle.record["bytes_packed"]
    # Sampler AR Video takes steps of its own kind, and the same two caches.
    rolled = run(packed, LONG, cfg=5.0)
    assert rolled.isfinite().all() and handle.record["tokens"] == V2.window * TOKENS
    raw, _ = patched(host, model, keep_first_blocks=12)
    window = {host.world_models.lingbot.WINDOW_KEY: host.world_models.lingbot.AttentionWindow(7, 2)}
    long = replace(pretrain, blocks=4, poses=61)
    torch.testing.assert_close(sample(raw, long, **window), sample(model, long, **window), rtol=1e-4, atol=1e-4)


def test_a_run_without_its_picture_is_refused(host, model):
    with pytest.raises(ValueError, match="starts from a picture. Connect LingBot Conditioning"):
        run(patched(host, model)[0], V2, concat_latent_image=None)


def test_a_block_that_does_not_fit_into_the_window(host, model):
    window = host.world_models.lingbot.AttentionWindow(7, 4)
    with pytest.raises(ValueError, match="a block of 4 latent frames needs a window of at least 8"):
        run(patched(host, model)[0], V2, **{host.world_models.lingbot.WINDOW_KEY: window})


def test_other_samplers_are_refused(host, model):
    import comfy.samplers

    with pytest.raises(ValueError, match="block by block. Sample it with Sampler AR Video"):
        run(model, V2, sampler=comfy.samplers.ksampler("euler"))


def test_blocks_come_back_by_the_camera_of_the_conditioning(host, model):
    """A camera that turns away and back again: the last block sees what the first blocks after the sink have seen."""
    core, lingbot = host.quantwm_core, host.world_models.lingbot
    causal = importlib.import_module("quantwm_pack.world_models.causal_wan.sampler")
    paths = importlib.import_module("quantwm_pack.world_models.lingbot.paths")
    version = replace(V2, blocks=9, poses=4 * 36 - 3)
    path = lingbot.CameraPath(
        paths.from_keyframes("0 0 0 0 0\n70 0 0 0 150\n140 0 0 0 0", 141), (416.0, 416.0, 416.0, 240.0)
    )
    changes = {lingbot.CAMERA_KEY: lingbot.latent_camera(path, 141, 36), lingbot.WINDOW_KEY: None}
    chained = changes[lingbot.CAMERA_KEY].chained()
    torch.testing.assert_close(chained[-1], torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-5)
    recalled = []

    memory = core.memory.MemorySettings(blocks=2)
    sampler = causal.WorldSampler(core.window.RolloutSettings(4, window=4, sink=4), memory=memory)
    packed, handle = patched(host, model)
    with pytest.MonkeyPatch.context() as patch:
        recall = core.WorldCache.recall
        patch.setattr(
            core.WorldCache, "recall", lambda self, blocks: (recalled.append(list(blocks)), recall(self, blocks))
        )
        assert run(packed, version, sampler=sampler, **changes).isfinite().all()
    assert handle.record["blocks_in_bank"] == 7
    # Latent frame 17.5 is where it turns back: the middles of blocks 6 and 7 are mirrored into frames 9 and 5.
    assert recalled[:2] == [[], []] and recalled[6:8] == [[1, 2], [1, 2]]

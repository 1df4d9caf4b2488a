"""World memory in the real host: blocks that left the window come back, on the host's cache and on ours."""

from __future__ import annotations

import pytest
import torch
from host.small_world import SIGMAS, TOKENS_PER_FRAME, load_model, prompt, with_first_frames


@pytest.fixture(scope="module")
def t48(host):
    return load_model(96)


@pytest.fixture(scope="module")
def sampler(host):
    """Makes a sampler from memory settings; window, sink and block by keyword."""
    core, causal = host.quantwm_core, host.world_models.causal_wan

    def make(window=6, sink=3, frames_per_block=3, **memory):
        rollout = core.window.RolloutSettings(frames_per_block, window, sink)
        return causal.sampler.WorldSampler(rollout, memory=core.memory.MemorySettings(**memory))

    return make


def patched(host, model, **settings):
    return host.world_models.attach(model, host.quantwm_core.CacheSettings(**settings))


def run(model, sampler, frames: int = 30, motion: tuple = (20.0, 0.2, 0.0)) -> torch.Tensor:
    """A rollout whose prompt says how the camera moves."""
    import comfy.samplers

    guider = comfy.samplers.CFGGuider(model)
    conds = [[prompt(1), {"camera_motion": motion} if motion else {}]]
    guider.set_conds(conds, conds)
    guider.set_cfg(1.0)
    noise = torch.randn(1, 16, frames, 6, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return guider.sample(noise, torch.zeros_like(noise), sampler, torch.tensor(SIGMAS), disable_pbar=True, seed=0)


def spied(host, model, sampler, frames: int = 30) -> list[tuple[list[int], list[int]]]:
    """Per block, the numbers of the blocks in the window and of those recalled, in the first layer's first pass."""
    layer_type, seen = host.world_models.causal_wan.run.PackedLayer, {}
    attend = layer_type._attend

    def spy(self, q, k, v, attention):
        if self._index == 0:
            held = [number for entry in self.layer.entries for number in entry.numbers]
            back = [first for first, _ in self.layer.recalled]
            seen.setdefault(len(self._run.handle.history), (held, back))
        return attend(self, q, k, v, attention)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_type, "_attend", spy)
        run(model, sampler, frames)
    return list(seen.values())


def test_the_blocks_with_the_nearest_views_are_back(host, t48, sampler):
    """A turn is 18 frames, six blocks: each block sees again what was made a turn before it."""
    packed, handle = patched(host, t48, method="rtn")
    seen = spied(host, packed, sampler(window=6, sink=3, blocks=2), 39)
    # The window holds two blocks and the sink's; six blocks ago is the same view, five or seven ago the nearest others.
    assert seen[3] == ([0, 1, 2], []) and seen[4] == ([0, 2, 3], [1])
    assert seen[9][0] == [0, 7, 8] and 3 in seen[9][1] and set(seen[9][1]) <= {2, 3, 4}
    assert seen[12][0] == [0, 10, 11] and 6 in seen[12][1] and set(seen[12][1]) <= {5, 6, 7}
    record = handle.record
    assert record["blocks_in_bank"] == 10 and record["tokens"] == 39 * TOKENS_PER_FRAME
    assert 0 < record["bytes_bank"] < record["bytes_packed"]


@pytest.mark.parametrize("given", [0, 8])
@pytest.mark.parametrize("options", [{"blocks": 2}, {"blocks": 3, "bank_blocks": 4}, {"blocks": 2, "keep": 0.5}])
def test_memory_is_the_same_on_the_hosts_cache_and_on_ours(host, t48, sampler, given, options):
    """Retrieval, a bounded bank and compression on plain tensors, with and without our patch, and on raw blocks."""
    model = with_first_frames(t48, given) if given else t48
    asked = sampler(**options)
    native = run(model, asked)
    off, off_handle = patched(host, model, method="off")
    assert torch.equal(run(off, asked), native)
    raw, handle = patched(host, model, keep_first_blocks=64)
    torch.testing.assert_close(run(raw, asked), native, rtol=1e-3, atol=1e-3)
    for name in ("tokens", "blocks_in_bank", "bytes_bank"):
        assert handle.record[name] == off_handle.record[name], name
    without = sampler(retrieval="off", keep=options.get("keep", 1.0))
    assert not torch.allclose(run(model, without), native, atol=1e-3)


@pytest.mark.parametrize("method", ["quantwm", "quantwm-paper", "rtn", "kivi", "qvg", "quarot"])
@pytest.mark.parametrize("retrieval", ["camera", "similarity"])
def test_every_method_remembers_and_compresses(host, t48, sampler, method, retrieval):
    packed, handle = patched(host, with_first_frames(t48, 7), method=method)
    asked = sampler(retrieval=retrieval, blocks=2, bank_blocks=5, keep=0.5)
    first = run(packed, asked)
    assert first.isfinite().all() and torch.equal(run(packed, asked), first)
    assert handle.record["blocks_in_bank"] > 0 and handle.record["bytes_bank"] > 0
    # Half of two of three frames is left out.
    assert handle.record["tokens"] < 0.8 * 30 * TOKENS_PER_FRAME


def test_memory_is_constant_with_a_bounded_bank(host, t48, sampler):
    packed, handle = patched(host, t48, method="rtn")
    run(packed, sampler(blocks=2, bank_blocks=5), 60)
    sizes = [entry["bytes_packed"] + entry["bytes_unpacked"] for entry in handle.history]
    assert len(set(sizes[9:])) == 1
    # An unbounded bank grows; what is in reach does not.
    run(packed, sampler(blocks=2), 60)
    history = handle.history
    in_reach = [entry["bytes_packed"] + entry["bytes_unpacked"] - entry["bytes_bank"] for entry in history]
    assert len(set(in_reach[6:])) == 1 and history[-1]["bytes_bank"] > history[10]["bytes_bank"]


def test_similarity_finds_the_keys_that_the_queries_ask_for(host):
    core = host.quantwm_core
    settings = core.CacheSettings(method="rtn")
    layer = core.LayerCache(settings, core.methods.build_method(settings))
    layer.keeps_means = True
    directions = torch.eye(64)[:5]
    for direction in directions:
        keys = (3 * direction + 0.1 * torch.randn(1, 20, 1, 64, generator=torch.Generator().manual_seed(0))).clone()
        layer.append(keys, keys)
        layer.commit()
    layer.retire(range(4), torch.device("cpu"))
    queries = (2 * directions[2] + directions[1]).expand(1, 9, 1, 64)
    layer.recall_similar(queries, 2)
    assert [first for first, _ in layer.recalled] == [1, 2]
    assert layer.usage()["state"] == 5 * 64 * 4


def test_compression_alone_needs_no_window(host, t48, sampler):
    packed, handle = patched(host, t48, method="rtn")
    run(packed, sampler(window=0, sink=0, retrieval="off", keep=0.25), 12)
    assert handle.record["tokens"] == 4 * (1 + 2 * 0.25) * TOKENS_PER_FRAME and handle.record["blocks_in_bank"] == 0


def test_what_cannot_work_is_refused_with_the_remedy(host, t48, sampler):
    with pytest.raises(ValueError, match="window is 0, so nothing leaves. Set window"):
        sampler(window=0)
    with pytest.raises(ValueError, match="says how the camera moves.*Set retrieval in World Memory to similarity"):
        run(t48, sampler(), motion=())
    with pytest.raises(ValueError, match="Connect Apply To World Model"):
        run(t48, sampler(retrieval="similarity"))


def test_after_an_error_nothing_is_left(host, t48, sampler):
    packed, _ = patched(host, t48, method="rtn")
    fresh = run(packed, sampler(blocks=2))
    with pytest.MonkeyPatch.context() as patch:
        calls = []

        def failing(self, blocks):
            calls.append(blocks)
            if len(calls) == 6:
                raise KeyboardInterrupt

        patch.setattr(host.quantwm_core.WorldCache, "recall", failing)
        with pytest.raises(KeyboardInterrupt):
            run(packed, sampler(blocks=2))
    assert torch.equal(run(packed, sampler(blocks=2)), fresh)

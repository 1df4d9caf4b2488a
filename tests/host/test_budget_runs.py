"""A cache budget in the real host: it holds in whole runs, and a larger one is nearer to the host's own cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from host.small_world import load_model, run, with_first_frames

from support import lingbot_case as case
from support import lingbot_run

FRAMES, BLOCK = 21, 3


@pytest.fixture(scope="module")
def model(host):
    return load_model(256)


def resident(record: dict) -> int:
    return sum(record[f"bytes_{kind}"] for kind in ("packed", "unpacked", "state")) - record["bytes_bank"]


def size_in(host, model, bits: int, **settings) -> int:
    """What the cache takes at the end of a run in so many bits, without a budget."""
    settings = host.quantwm_core.CacheSettings(key_bits=bits, value_bits=bits, **settings)
    packed, handle = host.world_models.attach(model, settings)
    run(packed, FRAMES, BLOCK)
    return resident(handle.record)


def limited(host, model, size: float, **settings):
    """A clone whose cache may take `size` bytes."""
    return host.world_models.attach(model, host.quantwm_core.CacheSettings(budget_gb=size / 2**30, **settings))


def within(handle) -> bool:
    record = handle.record
    sizes = [entry["bytes_packed"] + entry["bytes_unpacked"] - entry["bytes_bank"] for entry in handle.history]
    return max(*sizes, resident(record)) <= record["budget_bytes"]


@pytest.mark.parametrize("method", ["quantwm", "rtn", "qvg"])
@pytest.mark.parametrize("given", [0, 6])
def test_the_budget_holds_and_the_error_falls_as_it_grows(host, model, method, given):
    start = with_first_frames(model, given) if given else model
    expected = run(start, FRAMES, BLOCK)
    least, most = (size_in(host, start, bits, method=method) for bits in (2, 8))
    errors, widths = [], []
    for share in (0.1, 0.25, 0.5, 1.2):
        packed, handle = limited(host, start, least + share * (most - least), method=method)
        out = run(packed, FRAMES, BLOCK)
        assert within(handle), share
        assert torch.equal(run(packed, FRAMES, BLOCK), out)
        errors.append(((out - expected).norm() / expected.norm()).item())
        widths.append(handle.record["blocks_by_bits"])
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0] / 2, (errors, widths)
    assert set(widths[-1]) == {"8/8"} and len(set(map(str, widths))) > 2


def test_all_bits_equal_the_same_bits_without_a_budget(host, model):
    packed, _ = limited(host, model, 2**30)
    eight, _ = host.world_models.attach(model, host.quantwm_core.CacheSettings(key_bits=8, value_bits=8))
    assert torch.equal(run(packed, FRAMES, BLOCK), run(eight, FRAMES, BLOCK))


@pytest.mark.parametrize("cache_device", ["gpu", "cpu"])
@pytest.mark.parametrize("retrieval", [None, "similarity"])
def test_the_budget_holds_with_a_window_and_a_bank(host, model, cache_device, retrieval):
    causal, core = host.world_models.causal_wan, host.quantwm_core
    memory = core.memory.MemorySettings(retrieval=retrieval, blocks=1) if retrieval else None
    rollout = core.window.RolloutSettings(frames_per_block=BLOCK, window=6, sink=3)
    packed, handle = limited(
        host, model, 0.4 * size_in(host, model, 8, method="rtn"), method="rtn", cache_device=cache_device
    )
    out = run(packed, FRAMES, sampler=causal.sampler.WorldSampler(rollout, memory=memory))
    assert out.isfinite().all() and within(handle)
    assert len(handle.record["blocks_by_bits"]) > 1
    assert handle.record["blocks_in_bank"] == (FRAMES // BLOCK - 3 if retrieval else 0)


def test_a_budget_below_the_fewest_bits_is_reported(host, model):
    packed, handle = limited(host, model, 1000)
    run(packed, FRAMES, BLOCK)
    assert set(handle.record["blocks_by_bits"]) == {"2/2"}
    assert "the budget is exceeded by" in host.quantwm_core.format_report(handle)


def test_the_budget_holds_while_lingbots_cache_rolls_through_blocks(host):
    """Spans of several widths are cut in the middle."""
    long = replace(case.VERSIONS["v2"], blocks=8, poses=4 * 32 - 3)
    model = lingbot_run.load_model()
    eight, handle = host.world_models.attach(model, host.quantwm_core.CacheSettings("rtn", 8, 8))
    lingbot_run.run(eight, long)
    packed, handle = limited(host, model, 0.8 * resident(handle.record), method="rtn")
    assert lingbot_run.run(packed, long).isfinite().all() and within(handle)
    assert len(handle.record["blocks_by_bits"]) > 1

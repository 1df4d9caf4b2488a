"""LingBot-World with any number of frames, on caches that are rewound and poisoned: the plain one and ours."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from support import lingbot_case as case
from support.lingbot_run import load_model, run

TOKENS = case.HEIGHT * case.WIDTH // 4
V1, V2 = case.VERSIONS["v1"], case.VERSIONS["v2"]


@pytest.fixture(scope="module")
def model(host):
    return load_model()


@pytest.fixture(scope="module")
def window_module(host):
    return importlib.import_module("quantwm_pack.world_models.lingbot.window")


class Frames(case.Version):
    """A version whose video has any number of frames; the last block may be shorter."""

    total = 0

    @property
    def frames(self) -> int:
        return self.total


def version_of(frames: int, block: int, window: int = 0, sink: int = 0) -> case.Version:
    made = Frames(block, 0, V1.indices, window, sink, max(1, 4 * frames - 3))
    object.__setattr__(made, "total", frames)
    return made


def patched(host, model, **settings):
    return host.world_models.attach(model, host.quantwm_core.CacheSettings(**settings))


@pytest.mark.parametrize(("frames", "block"), [(5, 3), (1, 3), (20, 3), (31, 3), (3, 64)])
def test_any_number_of_frames(host, model, frames, block):
    """R11: `off` is bit-equal to the model alone; a packed cache holds every token of the video."""
    version = version_of(frames, block)
    off, handle = patched(host, model, method="off")
    assert torch.equal(run(off, version), run(model, version))
    packed, handle = patched(host, model)
    assert run(packed, version).isfinite().all()
    assert handle.record["tokens"] == frames * TOKENS and handle.record["blocks"] == -(-frames // block)


@pytest.mark.parametrize(("frames", "block"), [(20, 3), (31, 5), (9, 1)])
def test_a_window_rolls_through_uneven_blocks(host, model, frames, block):
    """The last block is shorter than the others, and the window no multiple of any."""
    version = version_of(frames, block, window=8, sink=2)
    native = run(model, version)
    off, _ = patched(host, model, method="off")
    assert torch.equal(run(off, version), native)
    raw, handle = patched(host, model, keep_first_blocks=64)
    torch.testing.assert_close(run(raw, version), native, rtol=1e-5, atol=1e-5)
    assert handle.record["tokens"] == 8 * TOKENS
    assert run(patched(host, model)[0], version).isfinite().all()


@pytest.mark.parametrize("method", [None, "off"])
@pytest.mark.parametrize("window", [0, 7])
def test_what_lies_behind_the_end_is_never_read(host, model, window_module, method, window):
    """R5: everything past `end` is poisoned after each forward; the run does not change."""
    version = replace(V2, window=window, sink=2 if window else 0)
    each = model if method is None else patched(host, model, method=method)[0]
    expected = run(each, version)
    caches = []
    init = window_module.WindowCache.__init__

    def keeping(self, *args):
        init(self, *args)
        caches.append(self)

    def poison(module, inputs, output):
        for cache in caches:
            for side in "kv":
                cache[side][:, cache["end"] :] = 1e4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_module.WindowCache, "__init__", keeping)
        hook = model.model.diffusion_model.register_forward_pre_hook(
            lambda module, inputs: poison(module, inputs, None)
        )
        try:
            assert torch.equal(run(each, version), expected)
        finally:
            hook.remove()
    assert caches


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_random_writes_rewinds_and_rolls_equal_plain_tensors(window_module, batch):
    """R5: 500 operations on the rolling cache, against a tensor that is cut and joined."""
    generator = torch.Generator().manual_seed(batch)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    cache = window_module.WindowCache(10_000, batch, 2, 4, "cpu", torch.float32)
    held = torch.zeros(batch, 0, 2, 4)
    window, sink = 40, 9
    for _ in range(500):
        if draw(0, 2) == 0:
            drop = draw(0, held.shape[1])
            cache["end"] -= drop
            held = held[:, : held.shape[1] - drop]
        else:
            block = torch.randn(batch, draw(1, 31), 2, 4, generator=generator)
            cache.make_room(block.shape[1], window, sink)
            surplus = max(0, held.shape[1] + block.shape[1] - window)
            held = (
                torch.cat((held[:, :sink], held[:, sink + surplus :], block), 1)
                if surplus
                else torch.cat((held, block), 1)
            )
            k, v = cache.write(block, 2 * block)
            assert torch.equal(k, held) and torch.equal(v, 2 * held)
        assert cache["end"] == held.shape[1]


def test_prompts_that_look_back_differently_are_refused(host, model):
    """The negative prompt from another LingBot Conditioning, without the window of the positive one."""
    lingbot = host.world_models.lingbot
    import comfy.samplers

    original = comfy.samplers.CFGGuider.set_conds

    def without_window(self, positive, negative):
        negative = [[text, settings | {lingbot.WINDOW_KEY: None}] for text, settings in negative]
        original(self, positive, negative)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.samplers.CFGGuider, "set_conds", without_window)
        for each in (patched(host, model)[0], patched(host, model, method="off")[0]):
            with pytest.raises(ValueError, match="both prompts have to look back equally far.*same window and sink"):
                run(each, V2, cfg=5.0)

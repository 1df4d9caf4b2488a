"""The world sampler in the real host: the host's result when nothing is asked of it, and what it does when asked."""

from __future__ import annotations

import pytest
import torch
from host.small_world import SIGMAS, TOKENS_PER_FRAME, load_model, prompt, run, with_first_frames

# (frames, block, given frames)
CASES = [(5, 3, 0), (1, 3, 0), (20, 3, 0), (4, 3, 1), (3, 64, 0), (7, 3, 2), (5, 1, 0)]


@pytest.fixture(scope="module")
def t48(host):
    return load_model(96)


@pytest.fixture(scope="module")
def causal(host):
    return host.world_models.causal_wan


@pytest.fixture(scope="module")
def sampler(host, causal):
    """Makes a sampler from rollout settings; prompts and on_block by keyword."""

    def make(prompts=(), on_block=None, **settings):
        rollout = host.quantwm_core.window.RolloutSettings(**settings)
        return causal.sampler.WorldSampler(rollout, prompts, on_block)

    return make


def patched(host, model, **settings):
    return host.world_models.attach(model, host.quantwm_core.CacheSettings(**settings))


@pytest.mark.parametrize(("frames", "block", "given"), CASES)
@pytest.mark.parametrize("cache", [None, "off", "rtn", "quantwm"])
def test_equals_the_host_when_nothing_is_asked(host, t48, sampler, frames, block, given, cache):
    model = with_first_frames(t48, given) if given else t48
    if cache:
        model, _ = patched(host, model, method=cache)
    expected = run(model, frames, block, seed=7)
    assert torch.equal(run(model, frames, block, seed=7, sampler=sampler(frames_per_block=block)), expected)


def test_equals_the_host_with_a_window_that_nothing_leaves(t48, sampler):
    expected = run(t48, 9, 3, batch=2)
    wide = sampler(frames_per_block=3, window=9, sink=3)
    assert torch.equal(run(t48, 9, 3, batch=2, sampler=wide), expected)


def test_one_given_video_serves_a_batch(t48, sampler):
    out = run(with_first_frames(t48, 2), 5, 3, batch=2, sampler=sampler(frames_per_block=3))
    assert torch.equal(out[0, :, :2], out[1, :, :2]) and not torch.equal(out[0, :, 2:], out[1, :, 2:])


@pytest.mark.parametrize(("given", "sink"), [(0, 0), (0, 3), (0, 4), (7, 3), (1, 1)])
def test_window_is_the_same_on_the_hosts_cache_and_on_ours(host, t48, sampler, given, sink):
    """Blocks that leave the host's tensors are those that leave the packed cache."""
    model = with_first_frames(t48, given) if given else t48
    windowed = sampler(frames_per_block=3, window=6, sink=sink)
    native = run(model, 20, sampler=windowed)
    off, handle = patched(host, model, method="off")
    assert torch.equal(run(off, 20, sampler=windowed), native)
    # Everything stays in full precision here, so only the order of keys in memory may differ.
    raw, raw_handle = patched(host, model, keep_first_blocks=64)
    torch.testing.assert_close(run(raw, 20, sampler=windowed), native, rtol=1e-4, atol=1e-4)
    assert raw_handle.record["tokens"] == handle.record["tokens"] <= (6 + sink + 3 + 2) * TOKENS_PER_FRAME
    assert not torch.allclose(run(model, 20, sampler=sampler(frames_per_block=3)), native, atol=1e-3)


@pytest.mark.parametrize(("span_blocks", "given", "sink"), [(2, 0, 3), (4, 0, 3), (4, 7, 3), (3, 0, 0), (3, 0, 7)])
@pytest.mark.parametrize("method", ["rtn", "quantwm"])
def test_spans_of_several_blocks_are_packed_and_leave(host, t48, sampler, method, span_blocks, given, sink):
    """Also where a span is longer than the window of two blocks, or begins in the sink."""
    model = with_first_frames(t48, given) if given else t48
    windowed = sampler(frames_per_block=3, window=6, sink=sink)
    packed, handle = patched(host, model, method=method, span_blocks=span_blocks)
    assert run(packed, 33, sampler=windowed).isfinite().all()
    history, record = handle.history, handle.record
    assert record["bytes_packed"] > 0
    # Beside the sink's: the window's two blocks, the newest, and one whose partner has not left yet.
    stay = -(-sink // 3) * 3
    assert max(entry["tokens"] for entry in history[-6:]) <= (stay + 6 + 6) * TOKENS_PER_FRAME
    block = 3 * TOKENS_PER_FRAME * 2 * 2 * 96 * 4  # both sides, two layers, float32
    assert min(entry["bytes_unpacked"] for entry in history[-4:]) < block
    plain, reference = patched(host, model, method=method)
    run(plain, 33, sampler=windowed)
    assert record["tokens"] <= reference.record["tokens"] + 3 * TOKENS_PER_FRAME


def test_window_forgets_what_left_it(host, t48, sampler):
    """The blocks that attention reads: the sink's whole block and as many new ones as fit into five frames."""
    seen = {}
    layer_type = host.world_models.causal_wan.run.PackedLayer
    attend = layer_type._attend

    def spy(self, q, k, v, attention):
        if self._index == 0:
            numbers = [n for entry in self.layer.entries for n in entry.numbers]
            seen.setdefault(len(self._run.handle.history), numbers)
        return attend(self, q, k, v, attention)

    packed, _ = patched(host, t48, method="rtn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_type, "_attend", spy)
        run(packed, 15, sampler=sampler(frames_per_block=2, window=5, sink=1))
    assert seen == {0: [], 1: [0], 2: [0, 1], 3: [0, 1, 2], 4: [0, 2, 3], 5: [0, 3, 4], 6: [0, 4, 5], 7: [0, 5, 6]}


@pytest.mark.parametrize("method", ["rtn", "quantwm", "quantwm-paper"])
def test_memory_is_constant_once_the_window_is_full(host, t48, sampler, method):
    packed, handle = patched(host, t48, method=method)
    run(packed, 60, sampler=sampler(frames_per_block=3, window=9, sink=3))
    sizes = [entry["bytes_packed"] + entry["bytes_unpacked"] for entry in handle.history]
    tokens = [entry["tokens"] for entry in handle.history]
    assert set(tokens[4:]) == {15 * TOKENS_PER_FRAME}  # the window, the sink, and the block before the oldest leaves
    # A codebook or basis that is learned anew lies beside the old one until the last span that uses that has left.
    assert max(sizes[5:]) <= 1.1 * sizes[4]
    if method == "rtn":
        assert len(set(sizes[4:])) == 1


def test_the_hosts_cache_is_made_for_the_window_only(host, t48, sampler):
    lengths = []
    model = t48.clone()
    network = type(t48.model.diffusion_model)

    def init(batch, tokens, device, dtype):
        lengths.append(tokens)
        return network.init_kv_caches(model.model.diffusion_model, batch, tokens, device, dtype)

    model.add_object_patch("diffusion_model.init_kv_caches", init)
    run(model, 40, sampler=sampler(frames_per_block=3, window=9, sink=3))
    assert lengths == [(5 + 9 + 3) * TOKENS_PER_FRAME]


def test_less_memory_is_asked_for_a_window(host, t48, sampler):
    planned = []
    adapter = host.world_models.causal_wan.adapter
    estimate = adapter.estimate_bytes

    def spy(settings, geometry, tokens, *rest):
        planned.append(tokens)
        return estimate(settings, geometry, tokens, *rest)

    packed, _ = patched(host, t48)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "estimate_bytes", spy)
        run(packed, 40, sampler=sampler(frames_per_block=2))
        run(packed, 40, sampler=sampler(frames_per_block=2, window=4))
    assert planned == [40 * TOKENS_PER_FRAME, 6 * TOKENS_PER_FRAME]


@pytest.mark.parametrize("cache", [None, "quantwm"])
def test_context_noise_is_stored_and_changes_what_follows(host, t48, sampler, cache):
    model, handle = patched(host, t48, method=cache) if cache else (t48, None)
    plain = run(model, 6, 3, sampler=sampler(frames_per_block=3))
    noisy = run(model, 6, 3, sampler=sampler(frames_per_block=3, context_noise=0.1))
    assert torch.equal(plain[:, :, :3], noisy[:, :, :3]) and not torch.equal(plain[:, :, 3:], noisy[:, :, 3:])
    assert torch.equal(run(model, 6, 3, sampler=sampler(frames_per_block=3, context_noise=0.1)), noisy)
    if handle:
        assert handle.record["tokens"] == 6 * TOKENS_PER_FRAME and handle.record["blocks"] == 2


def test_prompts_change_at_their_blocks(causal, t48, sampler):
    """Up to the change as with the first prompt, from it on otherwise; a change to the same prompt changes nothing."""
    change = causal.sampler.PromptChange
    plain = run(t48, 6, 2, sampler=sampler(frames_per_block=2))
    changed = run(t48, 6, 2, sampler=sampler([change(2, [[prompt(9), {}]])], frames_per_block=2))
    same = run(t48, 6, 2, sampler=sampler([change(2, [[prompt(1), {}]])], frames_per_block=2))
    back = [change(2, [[prompt(9), {}]]), change(3, [[prompt(1), {}]])]
    returned = run(t48, 6, 2, sampler=sampler(back, frames_per_block=2))
    assert torch.equal(same, plain)
    assert torch.equal(changed[:, :, :2], plain[:, :, :2]) and not torch.equal(changed[:, :, 2:4], plain[:, :, 2:4])
    assert torch.equal(returned[:, :, :4], changed[:, :, :4])
    assert not torch.equal(returned[:, :, 4:], changed[:, :, 4:])
    # The guider's own prompt is back for the next run.
    assert torch.equal(run(t48, 6, 2, sampler=sampler(frames_per_block=2)), plain)


def test_a_prompt_from_the_first_block_equals_that_prompt_in_the_guider(causal, t48, sampler):
    from_start = sampler([causal.sampler.PromptChange(1, [[prompt(9), {}]])], frames_per_block=2)
    import comfy.samplers

    guider = comfy.samplers.CFGGuider(t48)
    guider.set_conds([[prompt(9), {}]], [[prompt(9), {}]])
    guider.set_cfg(1.0)
    noise = torch.randn(1, 16, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = guider.sample(
            noise, torch.zeros_like(noise), sampler(frames_per_block=2), torch.tensor(SIGMAS), disable_pbar=True, seed=0
        )
    assert torch.equal(run(t48, 4, sampler=from_start), expected)


def test_progress_counts_every_forward_and_ends_with_the_whole_video(t48, sampler):
    seen, blocks = [], []
    asked = sampler(on_block=blocks.append, frames_per_block=2, window=2)
    out = run(t48, 5, sampler=asked, callback=lambda step, x0, x, total: seen.append((step, total, x0.shape[2])))
    assert [step for step, _, _ in seen] == list(range(12)) and {total for _, total, _ in seen} == {12}
    # Three denoise steps and a clean pass in each of three blocks; the previews are of the block being made.
    assert [frames for _, _, frames in seen] == [2] * 8 + [1] * 3 + [5]
    assert [entry["block"] for entry in blocks] == [1, 2, 3] and blocks[-1]["done"] == blocks[-1]["frames"] == 5
    assert [entry["in_reach"] for entry in blocks] == [2, 2, 1]
    assert out.isfinite().all()


def test_what_cannot_work_is_refused_with_the_remedy(t48, sampler):
    with pytest.raises(ValueError, match="must fit into the latent.*Give fewer frames"):
        run(with_first_frames(t48, 6), 5, sampler=sampler(frames_per_block=3))
    with pytest.raises(ValueError, match="window must be 0.*got 2. Raise window"):
        sampler(frames_per_block=3, window=2)
    with pytest.raises(ValueError, match="context_noise must be at least 0 and below 1"):
        sampler(context_noise=1.0)
    with pytest.raises(ValueError, match="frames_per_block must be a whole number from 1 to 64"):
        sampler(frames_per_block=0)


def test_schedules_that_end_above_zero_do_not_lose_history(t48, sampler):
    """Each forward is taken back exactly once: the host takes the last one back twice where the schedule is cut."""
    import comfy.samplers

    guider = comfy.samplers.CFGGuider(t48)
    guider.set_conds([[prompt(1), {}]], [[prompt(1), {}]])
    guider.set_cfg(1.0)
    noise = torch.randn(1, 16, 6, 6, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        out = guider.sample(
            noise,
            torch.zeros_like(noise),
            sampler(frames_per_block=3),
            torch.tensor(SIGMAS[:-1]),
            disable_pbar=True,
            seed=0,
        )
    assert out.isfinite().all()

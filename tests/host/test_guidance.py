"""Guidance (cfg other than 1) on world models: a cache for each conditioning, however the host batches them."""

from __future__ import annotations

import pytest
import torch
from host.small_world import SIGMAS, TOKENS_PER_FRAME, load_model, prompt, run, with_first_frames

CFG = 3.0


@pytest.fixture(scope="module")
def t128(host):
    return load_model(256)


@pytest.fixture(scope="module")
def untouched(host):
    """The same weights in a model that nobody patches."""
    return load_model(256)


@pytest.fixture(scope="module")
def sampler(host):
    """Makes a sampler from rollout settings; prompts and memory by keyword."""
    core, causal = host.quantwm_core, host.world_models.causal_wan

    def make(prompts=(), memory=None, **settings):
        rollout = core.window.RolloutSettings(**{"frames_per_block": 3} | settings)
        remembered = core.memory.MemorySettings(**memory) if memory else None
        return causal.sampler.WorldSampler(rollout, prompts, memory=remembered)

    return make


def patched(host, model, **settings):
    return host.world_models.attach(model, host.quantwm_core.CacheSettings(**settings))


def by_hand(model, frames: int, block: int, cfg: float, batch: int = 1) -> torch.Tensor:
    """Latent of the run that guidance should give: two lists of the network's own caches, and the formula."""
    network, sampling = model.model.diffusion_model, model.model.model_sampling
    x = torch.randn(batch, 16, frames, 6, 8, generator=torch.Generator().manual_seed(0))
    context = prompt(1)
    texts = [each.expand(batch, -1, -1) for each in (context, -context)]
    tokens = frames * TOKENS_PER_FRAME
    caches = [network.init_kv_caches(batch, tokens, "cpu", torch.float32) for _ in texts]
    text_caches = [network.init_crossattn_caches(batch, "cpu", torch.float32) for _ in texts]
    out = torch.zeros_like(x)

    def denoised(latent, sigma, start):
        level = torch.full((batch, latent.shape[2]), sigma)
        flows = [
            network.forward_block(latent, sampling.timestep(level), text, start, kv, known)
            for text, kv, known in zip(texts, caches, text_caches)
        ]
        cond, uncond = (latent - sigma * flow for flow in flows)
        return uncond + cfg * (cond - uncond)

    with torch.inference_mode():
        for number, start in enumerate(range(0, frames, block)):
            latent = x[:, :, start : start + block]
            for step, sigma in enumerate(SIGMAS[:-1]):
                latent = denoised(latent, sigma, start)
                for cache in (*caches[0], *caches[1]):
                    cache["end"] -= latent.shape[2] * TOKENS_PER_FRAME
                following = SIGMAS[step + 1]
                if following:
                    torch.manual_seed(number * 1000 + step)
                    latent = (1 - following) * latent + following * torch.randn_like(latent)
            out[:, :, start : start + block] = latent
            denoised(latent, 0.0, start)
    return model.model.process_latent_out(out)


@pytest.mark.parametrize("batches", ["together", "apart", "mixed"])
@pytest.mark.parametrize("ours", [False, True], ids=["Sampler AR Video", "World Sampler"])
def test_off_is_guidance_with_two_caches_however_it_is_batched(
    host, t128, untouched, sampler, monkeypatch, batches, ours
):
    """R8: both conditionings in one batch, in two calls, or first the one and then the other."""
    import comfy.samplers

    able, asked = comfy.samplers.can_concat_cond, []

    def can_concat(one, other):
        asked.append(1)
        together = batches == "together" or (batches == "mixed" and len(asked) < 4)
        return one is other or (together and able(one, other))

    expected = by_hand(untouched, 5, 3, CFG)
    monkeypatch.setattr(comfy.samplers, "can_concat_cond", can_concat)
    clone, handle = patched(host, t128, method="off")
    out = run(clone, 5, 3, cfg=CFG, sampler=sampler() if ours else None)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    record = handle.record
    assert (record["conditionings"], record["tokens"]) == (2, 5 * TOKENS_PER_FRAME)
    assert record["bytes_bf16"] == 2 * 60 * 2 * 2 * 2 * 128 * 2 and record["ratio_resident"] == 0.5


def test_the_world_sampler_needs_no_patch_for_it(t128, untouched, sampler):
    expected = by_hand(untouched, 5, 3, CFG, batch=2)
    out = run(t128, 5, 3, batch=2, cfg=CFG, sampler=sampler())
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_cfg_one_asks_the_prompt_alone(host, t128, sampler):
    plain = run(t128, 5, 3)
    clone, handle = patched(host, t128, method="off")
    assert torch.equal(run(clone, 5, 3, cfg=1.0), plain) and handle.record["conditionings"] == 1
    assert torch.equal(run(t128, 5, 3, cfg=1.0, sampler=sampler()), plain)


@pytest.mark.parametrize("method", ["quantwm", "quantwm-paper", "rtn", "kivi", "qvg"])
def test_packed_caches_of_both_are_counted(host, t128, sampler, method):
    """Twice what one conditioning takes, in the record, block by block and in the memory that is asked for."""
    one, handle = patched(host, t128, method=method)
    run(one, 20, 3)
    alone, blocks = dict(handle.record), [dict(entry) for entry in handle.history]
    out = run(one, 20, 3, cfg=CFG)
    both, entries = handle.record, handle.history
    assert out.isfinite().all() and torch.equal(run(one, 20, 3, cfg=CFG, sampler=sampler()), out)
    assert both["conditionings"] == 2 and both["tokens"] == alone["tokens"] and both["blocks"] == alone["blocks"]
    for name in ("bytes_bf16", "bytes_packed", "bytes_unpacked", "pack_events"):
        assert both[name] == 2 * alone[name], name
    assert both["bytes_workspace_peak"] == alone["bytes_workspace_peak"]
    assert both["ratio_packed"] == alone["ratio_packed"]
    assert [entry["tokens"] for entry in entries] == [entry["tokens"] for entry in blocks]
    assert [entry["bytes_packed"] for entry in entries] == [2 * entry["bytes_packed"] for entry in blocks]
    parts = [sum(entry["bytes_by_part"].values()) for entry in entries]
    assert parts == [2 * sum(entry["bytes_by_part"].values()) for entry in blocks]
    report = host.quantwm_core.accounting.format_report(handle)
    assert "for each of 2 conditionings (cfg)" in report


def test_more_bits_come_closer_with_guidance(host, t128):
    native, errors = run(patched(host, t128, method="off")[0], 6, 3, cfg=CFG), []
    for bits in (2, 4, 8):
        out = run(patched(host, t128, key_bits=bits, value_bits=bits)[0], 6, 3, cfg=CFG)
        errors.append(float((out - native).square().mean()))
    assert errors[0] > errors[1] > errors[2] > 0


def test_twice_the_memory_is_asked_from_the_host(host, t128):
    planned, adapter = [], host.world_models.causal_wan.adapter
    estimate = adapter.estimate_bytes

    def spy(*args):
        planned.append((args[3], estimate(*args)))
        return planned[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "estimate_bytes", spy)
        for cfg in (1.0, CFG):
            run(patched(host, t128)[0], 20, 3, cfg=cfg)
    assert [count for count, _ in planned] == [1, 2] and planned[1][1] > planned[0][1]


@pytest.mark.parametrize("given", [0, 7])
@pytest.mark.parametrize(
    "options", [{}, {"window": 6, "sink": 3}, {"window": 6, "memory": {"retrieval": "similarity"}}]
)
def test_windows_and_memory_hold_for_both(host, t128, sampler, given, options):
    """The same keys are in reach on the host's caches and on ours, whose blocks stay in full precision here."""
    model = with_first_frames(t128, given) if given else t128
    raw, handle = patched(host, model, keep_first_blocks=64)
    asked = sampler(**options)
    out = run(raw, 24, cfg=CFG, sampler=asked)
    assert handle.record["conditionings"] == 2 and len(handle.history) == -(-(24 - given) // 3) + (given > 0)
    if "memory" in options:
        assert out.isfinite().all() and handle.record["blocks_in_bank"] > 0
    else:
        torch.testing.assert_close(out, run(model, 24, cfg=CFG, sampler=asked), rtol=1e-4, atol=1e-4)
    packed, _ = patched(host, model)
    first = run(packed, 24, cfg=CFG, sampler=asked)
    assert torch.equal(run(packed, 24, cfg=CFG, sampler=asked), first)


def test_a_prompt_that_changes_goes_on_with_its_own_history(host, t128, sampler):
    change = host.world_models.causal_wan.sampler.PromptChange
    asked = sampler([change(2, [[prompt(9), {}]])])
    plain, changed = run(t128, 9, cfg=CFG, sampler=sampler()), run(t128, 9, cfg=CFG, sampler=asked)
    assert torch.equal(plain[:, :, :3], changed[:, :, :3]) and not torch.equal(plain[:, :, 3:], changed[:, :, 3:])
    same = sampler([change(2, [[prompt(1), {}]])])
    torch.testing.assert_close(run(t128, 9, cfg=CFG, sampler=same), plain, rtol=1e-5, atol=1e-5)


class Interval:
    """Makes a guider that leaves the negative prompt out at low noise, as guidance intervals do."""

    def __new__(cls, model, lowest: float, highest: float = 1.0):
        import comfy.samplers

        class Guider(comfy.samplers.CFGGuider):
            def predict_noise(self, x, timestep, model_options={}, seed=None):  # noqa: B006
                inside = lowest <= float(timestep[0]) <= highest
                conds = [self.conds["positive"], self.conds["negative"] if inside else None]
                cond, uncond = comfy.samplers.calc_cond_batch(self.inner_model, conds, x, timestep, model_options)
                return uncond + self.cfg * (cond - uncond) if inside else cond

        guider = Guider(model)
        guider.set_conds([[prompt(1), {}]], [[-prompt(1), {}]])
        guider.set_cfg(CFG)
        return guider


def sampled(guider, asked, frames: int = 9) -> torch.Tensor:
    noise = torch.randn(1, 16, frames, 6, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return guider.sample(noise, torch.zeros_like(noise), asked, torch.tensor(SIGMAS), disable_pbar=True, seed=0)


@pytest.mark.parametrize("lowest", [0.6, 0.9])
def test_a_guidance_interval_leaves_no_hole_in_the_history(host, t128, sampler, lowest):
    """The negative prompt sees every finished block, although the guider does not ask it then."""
    outputs = []
    for settings in (None, {"method": "off"}, {"keep_first_blocks": 64}, {}):
        model, handle = (t128, None) if settings is None else patched(host, t128, **settings)
        outputs.append(sampled(Interval(model, lowest), sampler(window=6)))
        if handle:
            assert handle.record["conditionings"] == 2 and handle.record["tokens"] == 6 * TOKENS_PER_FRAME
    assert torch.equal(outputs[0], outputs[1]) and outputs[3].isfinite().all()
    torch.testing.assert_close(outputs[0], outputs[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [None, "off", "quantwm"])
def test_what_has_no_history_is_refused_by_name(host, t128, sampler, method):
    model = t128 if method is None else patched(host, t128, method=method)[0]
    late = Interval(with_first_frames(model, 1), 0.5)
    with pytest.raises(ValueError, match="joined at latent frame 1. Set cfg in CFG Guider to one value"):
        sampled(late, sampler())
    import comfy.samplers

    several = comfy.samplers.CFGGuider(model)
    several.set_conds([[prompt(1), {}], [prompt(2), {}]], [[prompt(3), {}]])
    several.set_cfg(1.0)
    with pytest.raises(ValueError, match="this run has 2 in one of them, by Conditioning Combine"):
        sampled(several, sampler())


def test_a_budget_is_for_both(host, t128):
    geometry = host.quantwm_core.CacheGeometry(2, 2, 128)
    budget = 0.6 * geometry.bytes_bf16(30 * TOKENS_PER_FRAME)
    packed, handle = patched(host, t128, method="rtn", budget_gb=budget / (1 << 30))
    run(packed, 30, 3, cfg=CFG)
    record = handle.record
    assert abs(record["budget_bytes"] - budget) <= 2
    assert record["bytes_packed"] + record["bytes_unpacked"] + record["bytes_state"] <= budget


def test_the_same_model_runs_again_cold_and_after_an_error(host, t128):
    packed, _ = patched(host, t128)
    first = run(packed, cfg=CFG)
    with pytest.raises(KeyboardInterrupt):
        run(packed, cfg=CFG, callback=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    alone = run(packed)
    assert torch.equal(run(packed, cfg=CFG), first) and torch.equal(run(packed), alone)

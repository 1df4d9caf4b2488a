"""The packed cache on LongCat-Video in the real host: equality, batches, lifetime, LoRAs, refusals."""

import gc
import importlib
import weakref

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.host import ROOT
from support import longcat_case as case
from support.longcat_run import load_model, run

TOKENS = case.HEIGHT * case.WIDTH // 4
GUIDED = case.VERSIONS["guided"]
REFERENCE = ROOT / "tests" / "world_models" / "data" / "longcat_reference.safetensors"


@pytest.fixture(scope="module")
def model(host):
    return load_model()


def patched(host, model, **settings):
    return host.world_models.attach(model, host.quantwm_core.CacheSettings(**settings))


@pytest.mark.parametrize("version", case.VERSIONS.values(), ids=case.VERSIONS)
@pytest.mark.parametrize(
    "settings",
    [{"method": "off"}, {"key_bits": 16, "value_bits": 16}, {"method": "off", "cache_device": "cpu"}],
    ids=["off", "16/16", "off on the CPU"],
)
def test_off_equals_the_model_without_our_patch(host, model, version, settings):
    clone, handle = patched(host, model, **settings)
    assert torch.equal(run(clone, version), run(model, version))
    record = handle.record
    assert record["tokens"] == TOKENS * case.GIVEN
    # Float32 here: twice the size of BF16.
    assert record["bytes_unpacked"] == 2 * record["bytes_bf16"]


@pytest.mark.parametrize("method", ["quantwm", "quantwm-paper", "rtn", "kivi", "qvg", "qvg-pro", "quarot"])
def test_two_bits(host, model, method):
    """One span for the given frames, with the correction of keys where a method has one: queries were rehearsed."""
    clone, handle = patched(host, model, method=method)
    packed, plain = run(clone, GUIDED), run(model, GUIDED)
    assert packed.isfinite().all() and not torch.equal(packed, plain)
    assert torch.equal(packed[:, :, : case.GIVEN], plain[:, :, : case.GIVEN])
    record = handle.record
    assert (record["tokens"], record["blocks"]) == (TOKENS * case.GIVEN, 1)
    assert [entry["tokens"] for entry in handle.history] == [TOKENS * case.GIVEN]
    assert (record["bytes_by_part"]["psac_c"] > 0) == method.startswith("quantwm")


def test_more_bits_come_closer(host, model):
    plain, errors = run(model, GUIDED), []
    for bits in (2, 4, 8):
        out = run(patched(host, model, key_bits=bits, value_bits=bits)[0], GUIDED)
        errors.append(float((out - plain).norm() / plain.norm()))
    print(errors)
    assert errors[0] > errors[1] > errors[2] and errors[2] < 5e-3


def test_blocks_in_full_precision_give_the_same(host, model):
    """Nothing is rounded: what is left is where keys get RoPE, and one read for each prompt."""
    clone, handle = patched(host, model, keep_first_blocks=1)
    torch.testing.assert_close(run(clone, GUIDED), run(model, GUIDED), rtol=1e-4, atol=1e-4)
    assert handle.record["bytes_packed"] == 0


def test_layers_and_heads_with_bits_of_their_own(host, model):
    clone, handle = patched(host, model, bit_overrides="0=8, 1.0=4, 2=16")
    assert run(clone, GUIDED).isfinite().all()
    assert handle.record["bytes_by_part"]["psac_c"] > 0


def test_text_to_video_caches_nothing(host, model):
    nothing = torch.zeros(1, 16, 0, case.HEIGHT, case.WIDTH)
    clone, handle = patched(host, model)
    assert torch.equal(run(clone, GUIDED, given=nothing), run(model, GUIDED, given=nothing))
    assert handle.record is None


def test_several_videos_at_once(host, model):
    """From one start they share its cache; from different starts each has its own."""
    noise = torch.cat((case.noise(), -case.noise()))
    alone = [run(model, GUIDED, noise=noise[i : i + 1]) for i in (0, 1)]
    together = run(model, GUIDED, noise=noise, given=case.given())
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)
    clone, handle = patched(host, model)
    run(clone, GUIDED, noise=noise, given=case.given())
    one = handle.record["bytes_bf16"]
    starts = torch.cat((case.given(), -case.given()))
    differing = run(model, GUIDED, noise=noise, given=starts)
    torch.testing.assert_close(differing[:1], alone[0], rtol=1e-4, atol=1e-4)
    assert run(clone, GUIDED, noise=noise, given=starts).isfinite().all()
    assert handle.record["bytes_bf16"] == 2 * one


def test_the_same_model_runs_again_cold(host, model):
    clone, _ = patched(host, model)
    first = run(clone, GUIDED, seed=1)
    assert not torch.equal(run(clone, GUIDED, seed=2), first)
    assert torch.equal(run(clone, GUIDED, seed=1), first)


def test_an_interrupt_leaves_nothing_behind(host, model):
    import comfy.model_management as management

    runs = importlib.import_module("quantwm_pack.world_models.longcat.run")
    for each in (model, patched(host, model)[0]):
        fresh, alive = run(each, GUIDED), []

        def interrupt(step, *_, alive=alive):
            alive += [weakref.ref(found) for found in gc.get_objects() if isinstance(found, runs.LongCatRun)]
            raise management.InterruptProcessingException()

        with pytest.raises(management.InterruptProcessingException):
            run(each, GUIDED, callback=interrupt)
        gc.collect()
        assert alive and not any(ref() for ref in alive)
        assert torch.equal(run(each, GUIDED), fresh)


def test_memory_is_asked_for(host, model, monkeypatch):
    """The host is asked for more than it would plan for the latent alone."""
    import comfy.sampler_helpers

    planned = []
    estimate = comfy.sampler_helpers.estimate_memory

    def watch(model, noise_shape, conds):
        planned.append(list(noise_shape))
        return estimate(model, noise_shape, conds)

    monkeypatch.setattr(comfy.sampler_helpers, "estimate_memory", watch)
    run(patched(host, model)[0], GUIDED)
    run(model, GUIDED, given=torch.zeros(1, 16, 0, case.HEIGHT, case.WIDTH))
    assert planned[0][2] > planned[1][2] == case.FRAMES


def with_lora(model, lora):
    import comfy.sd

    return comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0.0)[0]


def one_step(model) -> torch.Tensor:
    """What the network says of pure noise at the case's timestep, through the sampler, so that patches apply."""
    import comfy.samplers

    sigma = case.TIMESTEP / 1000
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds([[case.text()[0][:1], {}]], [[case.text()[0][1:], {}]])
    guider.set_cfg(1.0)
    noise = case.noise()
    with torch.inference_mode():
        latent = model.model.process_latent_out(noise)
        sampler, sigmas = comfy.samplers.ksampler("euler"), torch.tensor([sigma, 0.0])
        out = guider.sample(noise, latent, sampler, sigmas, disable_pbar=True, seed=0)
    return ((model.model.process_latent_in(out) - noise) / sigma)[0]


def test_official_lora_as_the_public_code_applies_it(host, model):
    lora = importlib.import_module("quantwm_pack.world_models.longcat.lora")
    assert lora.is_official_lora(case.lora())
    ours = one_step(with_lora(model, lora.host_lora(case.lora())))
    theirs = load_file(REFERENCE)["lora"]
    assert float((ours - theirs).norm() / theirs.norm()) < 5e-5
    assert float((one_step(model) - theirs).norm() / theirs.norm()) > 0.05


@pytest.mark.parametrize(
    "name", ["diffusion_model.blocks.0.self_attn.k", "lora_unet_blocks_0_self_attn_k"], ids=["generic", "kohya"]
)
def test_lora_under_the_repacks_names_through_the_hosts_loader(host, model, name):
    generator = torch.Generator().manual_seed(3)
    up, down = torch.randn(256, 4, generator=generator), torch.randn(4, 256, generator=generator)
    lora = {f"{name}.lora_up.weight": up, f"{name}.lora_down.weight": down}
    changed = with_lora(patched(host, model)[0], lora)
    assert torch.equal(run(changed, GUIDED), run(patched(host, with_lora(model, lora))[0], GUIDED))
    assert not torch.equal(run(changed, GUIDED), run(patched(host, model)[0], GUIDED))


def test_latent_without_its_mask_is_refused(host, model):
    with pytest.raises(ValueError, match="comes with 2 given latent frames and the latent keeps 0. Connect the latent"):
        run(model, GUIDED, marked=case.GIVEN, masked=0)


def test_nothing_left_to_make_is_refused(host, model):
    with pytest.raises(ValueError, match="all 6 latent frames are given"):
        run(model, GUIDED, masked=case.FRAMES)


def test_a_correction_that_rotation_forbids(host, model):
    with pytest.raises(ValueError, match="stores keys before RoPE"):
        patched(host, model, jensen="exact")


def test_other_samplers_run(host, model):
    import comfy.sample

    rows, _ = case.text()
    latent, noise = model.model.process_latent_out(case.noise()), case.noise()
    mask = torch.ones(1, 1, case.FRAMES, 1, 1)
    mask[:, :, : case.GIVEN] = 0
    with torch.inference_mode():
        out = comfy.sample.sample(
            patched(host, model)[0],
            noise,
            3,
            4.0,
            "dpmpp_2m",
            "simple",
            [[rows[:1], {}]],
            [[rows[1:], {}]],
            latent,
            noise_mask=mask,
            disable_pbar=True,
            seed=0,
        )
    assert out.isfinite().all()


def test_a_budget_in_gigabytes(host, model):
    """Room for all in 8 bits leaves them there; hardly any takes the fewest."""
    bits = []
    for budget in (1.0, 1e-6):
        clone, handle = patched(host, model, budget_gb=budget)
        assert run(clone, GUIDED).isfinite().all()
        bits.append(handle.record["blocks_by_bits"])
    assert bits == [{"8/8": 1}, {"2/2": 1}]


def test_plan_and_room(host, model):
    """What Memory Planner asks of a model: its cache in bytes of BF16, and the room beside it."""
    world = host.world_models.world_of(model, 832, 480)
    assert (world.frame_tokens, world.frames_per_latent) == (1560, 4)
    assert world.geometry.bytes_bf16(1) == 4 * case.MODEL["depth"] * case.MODEL["hidden_size"]
    assert host.world_models.room_for_cache(model, 64, 64, 5) > 0


def test_a_probe_compares_true_and_packed_keys(host, model):
    probes = importlib.import_module("quantwm_pack.quantwm_core.probe")
    probe = probes.LogitProbe(teacher_forced=True)
    settings = host.quantwm_core.CacheSettings()
    clone, _ = host.world_models.attach(model, settings, probe=probe)
    torch.testing.assert_close(run(clone, GUIDED), run(model, GUIDED), rtol=1e-4, atol=1e-4)


def test_the_hosts_shift_node(host, model):
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    (shifted,) = ModelSamplingSD3().patch(model, 7.0)
    assert shifted.get_model_object("model_sampling").shift == 7.0
    scheduler = importlib.import_module("quantwm_pack.nodes.longcat_scheduler").QuantWMLongCatScheduler
    longcat = importlib.import_module("quantwm_pack.world_models.longcat")
    assert torch.equal(scheduler.execute(shifted, "standard", 0).args[0], longcat.sigmas(50, 7.0))
    assert torch.equal(scheduler.execute(model, "distilled", 0).args[0], longcat.distilled_sigmas(16, 12.0))
    assert len(scheduler.execute(model, "fine ending", 0).args[0]) == 57


def test_exact_budget_at_the_real_geometry(host):
    """One head of 19 latent frames at 480p, scaled to 48 layers of 32: the published 21.709 to 3.625 GiB, and ours."""
    caches = importlib.import_module("quantwm_pack.world_models.longcat.cache")
    positions = importlib.import_module("quantwm_pack.world_models.longcat.positions").positions
    core, scale = host.quantwm_core, 48 * 32 / 2**30
    k, v = torch.randn(2, 1, 19 * 1560, 1, 128, generator=torch.Generator().manual_seed(0)).bfloat16().unbind(0)
    asking = torch.randn(1, 512, 1, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed = {}
    for settings in (core.CacheSettings("quantwm-paper", centroids=256, rank=8), core.CacheSettings()):
        cache = caches.PackedCache(core.WorldCache(settings, core.CacheGeometry(1, 1, 128), prefilled=True))
        cache.begin(19, positions(128, (0, 19, 30, 52), torch.device("cpu")))
        cache.store(0, k, v, asking)
        record = cache.cache.record()
        assert round(record["bytes_bf16"] * scale, 3) == 21.709
        packed[settings.method] = round(record["bytes_packed"] * scale, 3)
    assert packed["quantwm-paper"] == 3.625 and packed["quantwm"] < 3.4


@pytest.mark.parametrize("settings", [{}, {"method": "kivi"}, {"jensen": "second-order"}, {"key_bits": 16}], ids=str)
def test_odd_sizes(host, model, settings):
    """Latents of 17 x 25, and more given tokens (234) than KIVI keeps in full precision."""
    generator = torch.Generator().manual_seed(3)
    noise, given = (torch.randn(1, 16, frames, 17, 25, generator=generator) for frames in (6, 2))
    plain = run(model, GUIDED, noise=noise, given=given)
    clone, handle = patched(host, model, **settings)
    packed = run(clone, GUIDED, noise=noise, given=given)
    assert packed.shape == noise.shape and handle.record["tokens"] == 2 * 9 * 13
    assert 0 < float((packed - plain).norm() / plain.norm()) < 0.2

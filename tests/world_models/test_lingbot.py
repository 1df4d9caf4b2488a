"""LingBot-World against the public code's own numbers, in float32.

The tolerances: the public code computes timestep features and rotations in float64, the host in float32 (an error of
6e-5 at timestep 999), and rounding differs. Mistakes that matter change the results by half a percent and more; the
tests at the end show how much.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.host import ROOT
from support import lingbot_case as case
from support.lingbot_run import camera_path, load_model, run

pytestmark = pytest.mark.host

REFERENCE = ROOT / "tests" / "world_models" / "data" / "lingbot_reference.safetensors"
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def lingbot(host):
    return importlib.import_module("quantwm_pack.world_models.lingbot")


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    return load_file(REFERENCE)


@pytest.fixture(scope="module")
def model(host):
    return load_model()


def test_as_many_parameters_as_the_published_file(host):
    """1.3B causal-fast: 30 blocks of width 1536, 1,709,502,016 parameters by reports of those who loaded it."""
    import comfy.ops

    network = importlib.import_module("quantwm_pack.world_models.lingbot.network")
    sizes = {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30, "in_dim": 36}
    made = network.LingBotModel(**sizes, device="meta", operations=comfy.ops.disable_weight_init)
    assert sum(parameter.numel() for parameter in made.parameters()) == 1_709_502_016


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("name", case.VERSIONS)
def test_schedule(lingbot, reference, name):
    schedule = importlib.import_module("quantwm_pack.world_models.lingbot.schedule")
    levels, timesteps = schedule.noise_levels()
    torch.testing.assert_close(torch.from_numpy(levels), reference[f"{name}.levels"][:1000], rtol=0, atol=1e-7)
    indices = list(case.VERSIONS[name].indices)
    assert timesteps[indices].tolist() == reference[f"{name}.timesteps"].tolist()


def test_published_timesteps_and_levels(model, lingbot):
    """The facts as they were found by running the public code: which level a timestep stands for, each way."""
    schedule = importlib.import_module("quantwm_pack.world_models.lingbot.schedule")
    levels, _ = schedule.noise_levels()
    sigmas = lingbot.few_step_sigmas(case.VERSIONS["v2"].indices)
    assert sigmas == [1.0, *levels[[249, 501, 751]].tolist(), 0.0]
    sampling = model.model.model_sampling
    sigmas = torch.tensor(sigmas)
    assert sampling.timestep(sigmas).tolist() == [999, 967, 908, 768, 0]
    undone = [-float(sampling.calculate_denoised(s, torch.ones(1), torch.zeros(1))) for s in sigmas]
    assert undone == [*levels[[0, 248, 500, 750]].tolist(), 0.0]


@pytest.mark.parametrize("name", case.VERSIONS)
def test_camera_poses_and_rays(lingbot, reference, name):
    version = case.VERSIONS[name]
    camera = lingbot.latent_camera(camera_path(version), version.poses, version.frames)
    # The public code takes differences of coordinates in float32, ours in float64.
    torch.testing.assert_close(camera.poses, reference[f"{name}.poses"], rtol=0, atol=3e-6)
    rays = camera.rays(torch.arange(1, 3), case.HEIGHT * 8, case.WIDTH * 8)
    rays = torch.nn.functional.pixel_unshuffle(rays, 8).movedim(0, 1)
    torch.testing.assert_close(rays, reference[f"{name}.rays"], rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", case.VERSIONS)
def test_every_stage_of_a_run(model, lingbot, reference, name):
    """Camera embedding, self-attention and block of the first pass; the flow of each block's first; all latents."""
    version, seen, flows = case.VERSIONS[name], {}, []
    network = model.model.diffusion_model

    def keep(part):
        def hook(module, inputs, output):
            seen.setdefault(part, output.clone())

        return hook

    def keep_camera(module, args, kwargs):
        seen.setdefault("camera_tokens", kwargs["camera"].clone())

    def keep_flow(module, inputs, output):
        flows.append(output.clone())

    first = network.blocks[0]
    hooks = [
        first.register_forward_hook(keep("block")),
        first.self_attn.register_forward_hook(keep("self_attention")),
        first.register_forward_pre_hook(keep_camera, with_kwargs=True),
        network.register_forward_hook(keep_flow),
    ]
    try:
        latents = run(model, version)
    finally:
        for hook in hooks:
            hook.remove()
    for part, ours in seen.items():
        off = difference(ours, reference[f"{name}.{part}"])
        print(name, part, f"{off:.1e}")
        assert off < TOLERANCE, part
    passes = len(version.indices) + 1
    ours = torch.stack([flow[0] for flow in flows[::passes]])
    off = [difference(ours, reference[f"{name}.flows"]), difference(latents, reference[f"{name}.latents"])]
    print(name, "flows, latents", off)
    assert max(off) < TOLERANCE


@pytest.fixture(scope="module")
def world_sampler(lingbot):
    """Makes a World Sampler for blocks of a version."""
    sampler = importlib.import_module("quantwm_pack.world_models.causal_wan.sampler")
    window = importlib.import_module("quantwm_pack.quantwm_core.window")
    return lambda version, **settings: sampler.WorldSampler(window.RolloutSettings(version.block, **settings))


def test_the_schedule_of_causal_pretrain(model, lingbot, reference):
    """40 levels with shift 10, and whole timesteps; a prediction is undone at its own level, not at a shared one."""
    release = lingbot.RELEASES["v2 causal-pretrain"]
    sigmas = torch.tensor(release.sigmas())
    torch.testing.assert_close(sigmas, reference["pretrain.levels"], rtol=0, atol=0)
    assert model.model.model_sampling.timestep(sigmas[:-1]).tolist() == reference["pretrain.timesteps"].tolist()
    assert (release.block, release.window, release.solver) == (4, 0, "unipc")


def test_causal_pretrain_with_guidance_as_the_public_code(model, lingbot, reference, world_sampler):
    """Two prompts with a cache each, cfg 5, UniPC: the first flow of each block, and all latents."""
    version, flows = case.PRETRAIN, []

    def keep_flow(module, inputs, output):
        flows.append(output[0].clone())

    hook = model.model.diffusion_model.register_forward_hook(keep_flow)
    try:
        latents = run(model, version, sampler=world_sampler(version), **{lingbot.SOLVER_KEY: "unipc"})
    finally:
        hook.remove()
    passes = 2 * (version.steps + 1)
    assert len(flows) == passes * version.blocks
    guided = [flows[i + 1] + version.cfg * (flows[i] - flows[i + 1]) for i in range(0, len(flows), passes)]
    off = [difference(torch.stack(guided), reference["pretrain.flows"])]
    off.append(difference(latents, reference["pretrain.latents"]))
    print("pretrain: flows, latents", off)
    assert max(off) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "settings"),
    [({"cfg": 1.0}, {}), ({"cfg": 4.0}, {}), ({}, {"solver": "few-step"})],
    ids=["no guidance", "less guidance", "new noise at every step"],
)
def test_tolerance_would_show_a_mistake_in_guidance(model, lingbot, reference, world_sampler, changes, settings):
    changes = {lingbot.SOLVER_KEY: "unipc"} | changes
    out = run(model, case.PRETRAIN, sampler=world_sampler(case.PRETRAIN, **settings), **changes)
    assert difference(out, reference["pretrain.latents"]) > 100 * TOLERANCE


def test_the_act_variant_as_the_public_code(host, lingbot, reference):
    """Directions of rays and keys in place of rays: what the embedding sees, what it makes of it, flows and latents."""
    version, seen, flows = case.VERSIONS["v1"], {}, []
    camera = lingbot.latent_camera(camera_path(version, act=True), version.poses, version.frames)
    rays = camera.act_rays(torch.arange(1, 3), case.HEIGHT * 8, case.WIDTH * 8)
    rays = torch.nn.functional.pixel_unshuffle(rays, 8).movedim(0, 1)
    torch.testing.assert_close(rays, reference["act.rays"], rtol=0, atol=3e-6)
    model = load_model(act=True)
    network = model.model.diffusion_model

    def keep_camera(module, args, kwargs):
        seen.setdefault("camera_tokens", kwargs["camera"].clone())

    hooks = [
        network.blocks[0].register_forward_pre_hook(keep_camera, with_kwargs=True),
        network.register_forward_hook(lambda module, inputs, output: flows.append(output[0].clone())),
    ]
    try:
        latents = run(model, version, **{lingbot.CAMERA_KEY: camera})
    finally:
        for hook in hooks:
            hook.remove()
    off = [difference(seen["camera_tokens"], reference["act.camera_tokens"])]
    off.append(difference(torch.stack(flows[:: len(version.indices) + 1]), reference["act.flows"]))
    off.append(difference(latents, reference["act.latents"]))
    print("act: camera tokens, flows, latents", off)
    assert max(off) < TOLERANCE
    with pytest.raises(ValueError, match="Set motion in Camera Path to actions, or put action.npy"):
        run(model, version)


def no_rolling(patch, lingbot, model):
    return {lingbot.WINDOW_KEY: None}


def sink_one_shorter(patch, lingbot, model):
    return {lingbot.WINDOW_KEY: lingbot.AttentionWindow(case.VERSIONS["v2"].window, case.VERSIONS["v2"].sink - 1)}


def window_without_the_block(patch, lingbot, model):
    version = case.VERSIONS["v2"]
    return {lingbot.WINDOW_KEY: lingbot.AttentionWindow(version.window + version.block, version.sink)}


def fractional_timesteps(patch, lingbot, model):
    from comfy.model_sampling import CONST, ModelSamplingDiscreteFlow

    sampling = type(model.model.model_sampling)
    patch.setattr(sampling, "timestep", ModelSamplingDiscreteFlow.timestep)
    patch.setattr(sampling, "calculate_denoised", CONST.calculate_denoised)
    return {}


def no_camera(patch, lingbot, model):
    return {lingbot.CAMERA_KEY: None}


def poses_cut_instead_of_stretched(patch, lingbot, model):
    version = case.VERSIONS["v2"]
    path = camera_path(version)
    return {lingbot.CAMERA_KEY: lingbot.latent_camera(path, 4 * (version.frames - 1) + 1, version.frames)}


def text_without_its_zeros(patch, lingbot, model):
    patch.setattr(model.model.diffusion_model, "text_len", case.TEXT_TOKENS)
    return {}


@pytest.mark.parametrize(
    "mistake",
    [
        no_rolling,
        sink_one_shorter,
        window_without_the_block,
        fractional_timesteps,
        no_camera,
        poses_cut_instead_of_stretched,
        text_without_its_zeros,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_tolerance_would_show_a_mistake(model, lingbot, reference, monkeypatch, mistake):
    changes = mistake(monkeypatch, lingbot, model)
    wrong = difference(run(model, case.VERSIONS["v2"], **changes), reference["v2.latents"])
    print(mistake.__name__, f"{wrong:.4f}")
    assert wrong > 100 * TOLERANCE

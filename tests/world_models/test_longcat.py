"""LongCat-Video against the public code's own numbers, in float32.

The tolerances: both compute in float32 and differ in the order of sums (single projections in place of joined ones) and
in rotations (float64 angles here). Mistakes that matter change the results by half a percent and more; the tests at the
end show how much.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.host import ROOT
from support import longcat_case as case
from support.longcat_run import load_model, run, sigmas

pytestmark = pytest.mark.host

REFERENCE = ROOT / "tests" / "world_models" / "data" / "longcat_reference.safetensors"
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    return load_file(REFERENCE)


@pytest.fixture(scope="module")
def network(host):
    return load_model().model.diffusion_model


@pytest.fixture(scope="module")
def parts(host):
    return importlib.import_module("quantwm_pack.world_models.longcat.network")


@pytest.fixture(scope="module")
def caches(host):
    return importlib.import_module("quantwm_pack.world_models.longcat.cache")


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


class Watch:
    """Outputs of every block for the first batch entry."""

    def __init__(self, network) -> None:
        self.blocks = []
        self.hooks = [block.register_forward_hook(self.keep) for block in network.blocks]

    def keep(self, module, inputs, output):
        self.blocks.append(output[0])

    def taken(self) -> torch.Tensor:
        for hook in self.hooks:
            hook.remove()
        return torch.stack(self.blocks)


def twice(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(2, 1, 1, 1, 1)


def test_as_many_parameters_as_published(host, parts):
    """13.6B: 48 blocks of width 4096 with 11008 in the feed-forward layers, head width 128."""
    import comfy.ops

    made = parts.LongCatModel(device="meta", operations=comfy.ops.disable_weight_init)
    assert round(sum(parameter.numel() for parameter in made.parameters()) / 1e9, 1) == 13.6
    assert (made.head_dim, made.num_layers) == (128, 48)


@torch.inference_mode()
def test_text_to_video_layer_by_layer(network, reference):
    watch = Watch(network)
    said = network.predict(twice(case.noise()), torch.full((2,), case.TIMESTEP), network.embed_text(case.text()[0], {}))
    for ours, theirs in zip(watch.taken(), reference["made_blocks"], strict=True):
        assert difference(ours, theirs) < TOLERANCE
    assert difference(said, reference["padded.made"]) < TOLERANCE


@torch.inference_mode()
def test_continuation_layer_by_layer(network, reference, caches):
    """Keys before RoPE and values of the given frames; then noisy frames behind them, with and without the cache."""
    cache, kept = caches.PlainCache(), []
    store = cache.store

    def keep(layer, k, v, asking):
        kept.append((k[0], v[0]))
        store(layer, k, v, asking)

    cache.store = keep
    network.prefill(case.given(), cache)
    for side, name in enumerate(("keys", "values")):
        ours = torch.stack([pair[side].transpose(0, 1) for pair in kept])
        assert difference(ours, reference[name]) < TOLERANCE, name
    watch = Watch(network)
    noisy = twice(case.noise()[:, :, case.GIVEN :])
    text = network.embed_text(case.text()[0], {})
    said = network.predict(noisy, torch.full((2,), case.TIMESTEP), text, cache)
    for ours, theirs in zip(watch.taken(), reference["cached_blocks"], strict=True):
        assert difference(ours, theirs) < TOLERANCE
    assert difference(said, reference["padded.cached"]) < TOLERANCE
    assert difference(said, reference["padded.uncached"]) < TOLERANCE


@torch.inference_mode()
def test_without_the_padding_of_the_prompt(host, reference, caches):
    network = load_model(zero_pad=False).model.diffusion_model
    text, late = network.embed_text(case.text()[0], {}), torch.full((2,), case.TIMESTEP)
    assert text.rows.shape[1] == case.PROMPT_TOKENS
    said = network.predict(twice(case.noise()), late, text)
    assert difference(said, reference["unpadded.made"]) < TOLERANCE
    cache = caches.PlainCache()
    network.prefill(case.given(), cache)
    said = network.predict(twice(case.noise()[:, :, case.GIVEN :]), late, text, cache)
    assert difference(said, reference["unpadded.cached"]) < TOLERANCE
    assert difference(reference["unpadded.cached"], reference["padded.cached"]) > 0.05


@pytest.mark.parametrize("name", case.VERSIONS)
def test_whole_runs(host, reference, name):
    """Sampled by the host: sign, time steps, guidance, Euler steps and positions of a continuation."""
    version = case.VERSIONS[name]
    latents = run(load_model(version.shift), version)
    off = difference(latents[0, :, case.GIVEN :], reference[f"{name}.latents"])
    print(name, f"{off:.1e}")
    assert off < TOLERANCE
    torch.testing.assert_close(latents[:, :, : case.GIVEN], case.given(), rtol=0, atol=1e-5)


def test_the_published_code_without_its_cache(reference):
    """The same without guidance; with it, its scale counts the given frames, and what is made differs."""
    distilled = difference(reference["distilled.latents_uncached"], reference["distilled.latents"])
    guided = difference(reference["guided.latents_uncached"], reference["guided.latents"])
    assert distilled < TOLERANCE < 1e-3 < guided


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("standard", case.Version(50, 12.0, 4.0)),
        ("fine", case.Version(50, 12.0, 4.0, fine_ending=True)),
        ("distilled", case.Version(16, 7.0, 1.0, distilled=True)),
    ],
)
def test_noise_levels(host, reference, name, version):
    torch.testing.assert_close(sigmas(version), reference[f"sigmas.{name}"], rtol=0, atol=1e-6)


def test_fine_ending_makes_56_steps_of_50(host):
    assert len(sigmas(case.Version(50, 12.0, 4.0, fine_ending=True))) == 56 + 1


def test_too_many_distilled_steps(host):
    with pytest.raises(ValueError, match="picks its steps from 50; got 51"):
        sigmas(case.Version(51, 7.0, 1.0, distilled=True))


def flipped_sign(patch, parts):
    forward = parts.LongCatModel.forward
    patch.setattr(parts.LongCatModel, "forward", lambda *args, **kwargs: -forward(*args, **kwargs))


def unshifted_positions(patch, parts):
    plain = parts.positions
    patch.setattr(parts, "positions", lambda head_dim, place, device: plain(head_dim, (0, *place[1:]), device))


def rounded_steps(patch, parts):
    forward = parts.StepEmbedding.forward
    patch.setattr(parts.StepEmbedding, "forward", lambda self, step: forward(self, step.bfloat16().float()))


def plain_guidance(patch, parts):
    guidance = importlib.import_module("quantwm_pack.world_models.longcat.model")
    patch.setattr(
        guidance,
        "guided_flow",
        lambda args: args["uncond"] + args["cond_scale"] * (args["cond"] - args["uncond"]),
    )


@pytest.mark.parametrize("mistake", [flipped_sign, unshifted_positions, rounded_steps, plain_guidance])
def test_mistakes_would_show(host, parts, reference, monkeypatch, mistake):
    mistake(monkeypatch, parts)
    version = case.VERSIONS["guided"]
    off = difference(run(load_model(version.shift), version)[0, :, case.GIVEN :], reference["guided.latents"])
    print(mistake.__name__, f"{off:.1e}")
    assert off > 100 * TOLERANCE

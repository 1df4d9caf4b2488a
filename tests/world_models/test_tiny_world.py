"""The embedded world: its pictures, its codec as a ComfyUI VAE, its nodes, and a rollout in the host's sampler."""

from __future__ import annotations

import importlib

import pytest
import torch

CAMERA = {"turn_rate": 18.0, "orbit": 0.2, "phase": 40.0}
CODEC_DB = 37.0  # measured 39 to 40 over rooms that no training step has seen
SEED_FRAMES, LENGTH = 3, 6


@pytest.fixture(scope="module")
def tiny_world(host):
    return host.world_models.tiny_world


@pytest.fixture(scope="module")
def vae(tiny_world):
    return tiny_world.load_codec_vae()


@pytest.fixture(scope="module")
def model(tiny_world):
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(tiny_world.WORLD_FILE))


@pytest.fixture(scope="module")
def stock_nodes(host):
    """ComfyUI's own nodes.py."""
    return importlib.import_module("nodes")


def psnr(images: torch.Tensor, truth: torch.Tensor) -> float:
    return -10 * (images - truth).square().mean().log10().item()


def run_sampler(model, latent: torch.Tensor, conditioning: list, block: int = 3, seed: int = 0) -> torch.Tensor:
    """Four steps of the host's autoregressive sampler, as the template's graph runs them."""
    import comfy.sample
    import comfy.samplers

    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(conditioning, conditioning)
    guider.set_cfg(1.0)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 4)
    sampler = comfy.samplers.ksampler("ar_video", {"num_frame_per_block": block})
    noise = comfy.sample.prepare_noise(latent, seed)
    return guider.sample(noise, latent, sampler, sigmas, disable_pbar=True, seed=seed)


def seeded(host, model, vae, **inputs):
    """Outputs of Tiny World Seed: model, latent, true frames."""
    module = importlib.import_module(f"{host.__name__}.nodes.tiny_world_seed")
    inputs = {"world_seed": 5, "turn_rate": 18.0, "orbit": 0.2, "orbit_phase": 40.0, **inputs}
    return module.TinyWorldSeed.execute(model=model, vae=vae, **inputs).args


class TestRender:
    def test_a_seed_is_a_world(self, tiny_world):
        first, again = (tiny_world.render(5, frames=2, **CAMERA) for _ in range(2))
        assert first.shape == (2, tiny_world.HEIGHT, tiny_world.WIDTH, 3)
        assert torch.equal(first, again)
        assert 0 <= first.min() and first.max() <= 1
        assert psnr(first, tiny_world.render(6, frames=2, **CAMERA)) < 25

    def test_the_random_state_of_the_process_does_not_matter(self, tiny_world):
        before = torch.get_rng_state()
        tiny_world.render(5, frames=1, **CAMERA)
        assert torch.equal(before, torch.get_rng_state())

    def test_a_view_comes_back_after_a_full_turn(self, tiny_world):
        frames = tiny_world.render(7, frames=21, **CAMERA)
        assert psnr(frames[20], frames[0]) > 60
        assert psnr(frames[10], frames[0]) < 25

    def test_a_longer_clip_begins_with_the_shorter_one(self, tiny_world):
        assert torch.equal(tiny_world.render(8, frames=2, **CAMERA), tiny_world.render(8, frames=4, **CAMERA)[:2])


class TestConditioning:
    def test_four_numbers_are_four_tokens(self, tiny_world):
        context = tiny_world.conditioning(**CAMERA)
        assert context.shape == (1, 4, 64)
        for other in ({"turn_rate": -18.0}, {"orbit": 0.1}, {"phase": 41.0}):
            assert not torch.equal(context, tiny_world.conditioning(**{**CAMERA, **other}))

    @pytest.mark.parametrize(
        ("camera", "message"),
        [
            ({"turn_rate": 0.3}, "turn_rate must be between 14 and 22 .* got 0.3. Set it to 18"),
            ({"turn_rate": -30.0}, "turn_rate must be between 14 and 22 .* got -30"),
            ({"orbit": 0.5}, "orbit must be between 0 and 0.35, got 0.5. Set it to 0"),
        ],
    )
    def test_untrained_motion_is_refused(self, tiny_world, camera, message):
        with pytest.raises(ValueError, match=message):
            tiny_world.conditioning(**{**CAMERA, **camera})


class TestVAE:
    def test_pictures_survive_the_codec(self, tiny_world, vae):
        frames = torch.cat([tiny_world.render(seed, frames=1, **CAMERA) for seed in range(1000, 1012)])
        assert psnr(vae.decode(vae.encode(frames))[0], frames) > CODEC_DB

    def test_stock_nodes_take_it(self, tiny_world, vae, stock_nodes):
        frames = tiny_world.render(5, frames=4, **CAMERA)
        (latent,) = stock_nodes.VAEEncode().encode(vae, frames)
        assert latent["samples"].shape == (1, 16, 4, 16, 24)
        (decoded,) = stock_nodes.VAEDecode().decode(vae, latent)
        assert decoded.shape == frames.shape
        with torch.inference_mode():  # as the host runs every node; its tiling works in no other mode
            (tiled,) = stock_nodes.VAEDecodeTiled().decode(vae, latent, tile_size=128, overlap=32)
        assert psnr(tiled, decoded) > 25

    def test_a_batch_of_videos_decodes_in_order(self, tiny_world, vae, stock_nodes):
        clips = [tiny_world.render(seed, frames=2, **CAMERA) for seed in (1, 2)]
        latent = torch.cat([vae.encode(clip) for clip in clips])
        (decoded,) = stock_nodes.VAEDecode().decode(vae, {"samples": latent})
        assert psnr(decoded, torch.cat(clips)) > CODEC_DB - 3

    def test_the_model_sees_normalised_latents(self, tiny_world, vae, model):
        frames = torch.cat([tiny_world.render(seed, frames=1, **CAMERA) for seed in range(12)])
        latent = model.model.process_latent_in(vae.encode(frames))
        assert latent.mean().abs() < 0.2
        assert 0.7 < latent.std() < 1.3


class TestSeed:
    def test_outputs(self, host, tiny_world, model, vae):
        seeded_model, latent, frames = seeded(host, model, vae, seed_frames=SEED_FRAMES, length=LENGTH)
        initial = seeded_model.model_options["transformer_options"]["ar_config"]["initial_latent"]
        assert initial.shape == (1, 16, SEED_FRAMES, 16, 24)
        assert latent["samples"].shape == (1, 16, LENGTH, 16, 24)
        assert torch.equal(frames, tiny_world.render(5, frames=LENGTH, **CAMERA))
        assert "ar_config" not in model.model_options["transformer_options"]

    @pytest.mark.parametrize("numbers", [(6, 6), (7, 6), (0, 6)])
    def test_nothing_left_to_generate_is_refused(self, host, model, vae, numbers):
        with pytest.raises(
            ValueError, match=r"seed_frames must be at least 1 and smaller than length, got seed_frames"
        ):
            seeded(host, model, vae, seed_frames=numbers[0], length=numbers[1])

    def test_another_vae_is_refused(self, host, model):
        class Other:
            def encode(self, images):
                return torch.zeros(1, 4, 16, 24)

        with pytest.raises(ValueError, match="vae must turn 3 frames .* Connect the VAE of the node Tiny World VAE"):
            seeded(host, model, Other(), seed_frames=SEED_FRAMES, length=LENGTH)


class TestRollout:
    @pytest.mark.parametrize("block", [3, 1])
    def test_short_rollout(self, host, tiny_world, model, vae, block):
        seeded_model, latent, frames = seeded(host, model, vae, seed_frames=SEED_FRAMES, length=LENGTH)
        context = [[tiny_world.conditioning(**CAMERA), {}]]
        video = vae.decode(run_sampler(seeded_model, latent["samples"], context, block))[0]
        assert video.shape == frames.shape
        assert psnr(video[:SEED_FRAMES], frames[:SEED_FRAMES]) > CODEC_DB - 3
        assert psnr(video[SEED_FRAMES], frames[SEED_FRAMES]) > 15

    def test_walls_come_back_after_a_full_turn(self, host, tiny_world, model, vae):
        seeded_model, latent, frames = seeded(host, model, vae, seed_frames=21, length=24)
        context = [[tiny_world.conditioning(**CAMERA), {}]]
        video = vae.decode(run_sampler(seeded_model, latent["samples"], context))[0]
        assert psnr(video[21:], frames[21:]) > 22


def test_training_runs_the_host_s_network(host):
    """Teacher forcing must compute what the host computes with its cache, or the sampler meets another model."""
    from training.tiny_world.attention import TeacherForcingAttention
    from training.tiny_world.network import TOKENS_PER_FRAME, TeacherForcing, build_model

    cpu, sizes, levels = torch.device("cpu"), [2, 3, 1], torch.tensor([0.9, 0.6, 0.3])
    torch.manual_seed(0)
    network = build_model(cpu).requires_grad_(False)
    network.head.head.weight.normal_(0, 0.05)
    clean, noisy = torch.randn(2, 1, 16, sum(sizes), 16, 24).unbind(0)
    context = torch.randn(1, 4, 64)
    attention = TeacherForcingAttention([sizes], 1, TOKENS_PER_FRAME, cpu, flex=False)
    sigma = levels.repeat_interleave(torch.tensor(sizes)).view(1, 1, -1)
    ours = TeacherForcing(compiled=False).velocity(network, clean, noisy[:, None], sigma, context, attention)[:, 0]

    caches = network.init_kv_caches(1, sum(sizes) * TOKENS_PER_FRAME, cpu, torch.float32)
    state = {"kv_caches": caches, "crossattn_caches": network.init_crossattn_caches(1, cpu, torch.float32)}
    start, blocks = 0, []
    for size, level in zip(sizes, levels):
        options = {"ar_state": {**state, "start_frame": start}}
        frames = slice(start, start + size)
        blocks.append(network(noisy[:, :, frames], level[None] * 1000, context, transformer_options=options))
        for cache in caches:
            cache["end"] -= size * TOKENS_PER_FRAME
        network(clean[:, :, frames], torch.zeros(1), context, transformer_options=options)
        start += size
    torch.testing.assert_close(ours, torch.cat(blocks, dim=2), atol=1e-5, rtol=1e-4)

"""Record what the public LongCat-Video code computes on small random weights, as test data.

    python scripts/record_longcat_reference.py CHECKOUT

CHECKOUT is meituan-longcat/LongCat-Video; recorded from commit 6b3f4b8 with torch 2.14.1 and diffusers 0.33.1. Weights
and inputs come from tests/support/longcat_case.py by seed. Only the attention functions are replaced, by PyTorch's, as
the public ones need CUDA; everything runs in float32. Nothing of the public code is kept, only its numbers.
"""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import longcat_case as case  # noqa: E402

TARGET = ROOT / "tests" / "world_models" / "data" / "longcat_reference.safetensors"


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Plain attention on `[B, S, H, D]`."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def flash_attn_func(q, k, v, **_):
    return attend(q, k, v)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, **_):
    """The entries of a batch lie one after the other, each with its own number of tokens."""
    ends = zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], cu_seqlens_k.tolist(), cu_seqlens_k.tolist()[1:])
    return torch.cat([attend(q[None, a:b], k[None, c:d], v[None, c:d])[0] for a, b, c, d in ends])


def stand_in(name: str, **members) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)


def import_reference(checkout: Path) -> types.SimpleNamespace:
    """The modules of a checkout; what needs CUDA to be imported, or serves the pictures, is stood in for."""
    sys.path.insert(0, str(checkout))
    fakes = {
        "longcat_video.block_sparse_attention.bsa_interface": {"flash_attn_bsa_3d": None},
        "longcat_video.modules.autoencoder_kl_wan": {"AutoencoderKLWan": None},
    }
    for name, members in fakes.items():
        stand_in(name, **members)
    from longcat_video import pipeline_longcat_video as pipeline
    from longcat_video.modules import longcat_video_dit as network
    from longcat_video.modules import scheduling_flow_match_euler_discrete as scheduling

    # Looked for when attention is computed; other packages must not find it while they are imported.
    stand_in("flash_attn", flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    return types.SimpleNamespace(pipeline=pipeline, network=network, scheduling=scheduling)


def load(reference, zero_pad: bool):
    made = reference.network.LongCatVideoTransformer3DModel(
        **case.MODEL, enable_flashattn2=True, cp_split_hw=[1, 1], text_tokens_zero_pad=zero_pad
    ).eval()
    made.load_state_dict(case.weights())
    return made


class Watch:
    """Outputs of every block during a forward."""

    def __init__(self, network) -> None:
        self.blocks: list[torch.Tensor] = []
        self._hooks = [block.register_forward_hook(self._keep) for block in network.blocks]

    def _keep(self, module, inputs, output) -> None:
        self.blocks.append(output[0] if isinstance(output, tuple) else output)

    def taken(self) -> torch.Tensor:
        for hook in self._hooks:
            hook.remove()
        return torch.stack(self.blocks)


def forwards(reference) -> dict[str, torch.Tensor]:
    """Single forwards, per layer: text to video, and a continuation with and without the cache."""
    rows, mask = case.text()
    given, noise = case.given(), case.noise()
    noisy = noise[:, :, case.GIVEN :]
    late = torch.full((2, noisy.shape[2]), case.TIMESTEP)
    found = {}
    for name, zero_pad in (("padded", True), ("unpadded", False)):
        network = load(reference, zero_pad)
        prompt = {"encoder_hidden_states": rows[:, None], "encoder_attention_mask": mask}
        watch = Watch(network)
        found[f"{name}.made"] = network(noise.repeat(2, 1, 1, 1, 1), torch.full((2,), case.TIMESTEP), **prompt)
        made_blocks = watch.taken()[:, 0]

        _, cache = network(given, torch.zeros(1, case.GIVEN), rows[:1, None], return_kv=True, skip_crs_attn=True)
        watch = Watch(network)
        found[f"{name}.cached"] = network(
            noisy.repeat(2, 1, 1, 1, 1), late, num_cond_latents=case.GIVEN, kv_cache_dict=cache, **prompt
        )
        cached_blocks = watch.taken()[:, 0]

        whole = torch.cat((given, noisy), dim=2).repeat(2, 1, 1, 1, 1)
        steps = torch.cat((torch.zeros(2, case.GIVEN), late), dim=1)
        uncached = network(whole, steps, num_cond_latents=case.GIVEN, **prompt)
        found[f"{name}.uncached"] = uncached[:, :, case.GIVEN :]
        if zero_pad:
            found |= {"made_blocks": made_blocks, "cached_blocks": cached_blocks}
            found["keys"], found["values"] = (torch.stack([kv[side][0] for kv in cache.values()]) for side in (0, 1))
    return found


def schedule(reference, version: case.Version):
    """A scheduler with the timesteps of a run, as the public pipeline sets it up."""
    pipeline = object.__new__(reference.pipeline.LongCatVideoPipeline)
    pipeline._num_timesteps, pipeline._num_distill_sample_steps = 1000, 50
    scheduler = reference.scheduling.FlowMatchEulerDiscreteScheduler(shift=version.shift)
    levels = pipeline.get_timesteps_sigmas(version.steps, use_distill=version.distilled)
    scheduler.set_timesteps(version.steps, sigmas=levels)
    if version.fine_ending:
        ending = [500.0 * (10 - step) / 10 for step in range(10)]
        kept = [float(step) for step in scheduler.timesteps if step > 500]
        scheduler.timesteps = torch.tensor(kept + ending)
        scheduler.sigmas = torch.cat((scheduler.timesteps / 1000, torch.zeros(1)))
    return pipeline, scheduler


def run(reference, network, version: case.Version, use_cache: bool = True) -> torch.Tensor:
    """The made latents `[16, n, H, W]` of one continuation."""
    pipeline, scheduler = schedule(reference, version)
    rows, mask = case.text()
    guided = version.cfg > 1
    count = 2 if guided else 1
    # The public pipeline puts the negative prompt first.
    prompt = {
        "encoder_hidden_states": rows.flip(0)[-count:, None],
        "encoder_attention_mask": mask.flip(0)[-count:],
    }
    given, latents = case.given(), case.noise()[:, :, case.GIVEN :]
    cache = {}
    if use_cache:
        _, cache = network(given, torch.zeros(1, case.GIVEN), rows[:1, None], return_kv=True, skip_crs_attn=True)
    for step in scheduler.timesteps:
        whole = latents if use_cache else torch.cat((given, latents), dim=2)
        timestep = step.expand(count, whole.shape[2]).clone()
        if not use_cache:
            timestep[:, : case.GIVEN] = 0
        said = network(
            whole.repeat(count, 1, 1, 1, 1), timestep, num_cond_latents=case.GIVEN, kv_cache_dict=cache, **prompt
        )
        if guided:
            negative, positive = said.chunk(2)
            fit = pipeline.optimized_scale(positive.flatten(1), negative.flatten(1)).view(1, 1, 1, 1, 1)
            said = negative * fit + version.cfg * (positive - negative * fit)
        said = said if use_cache else said[:, :, case.GIVEN :]
        latents = scheduler.step(-said, step, latents, return_dict=False)[0]
    return latents[0]


def with_lora(reference) -> torch.Tensor:
    """A text-to-video forward of the network with the small LoRA."""
    network = load(reference, True)
    file = TARGET.with_name("lora.tmp.safetensors")
    save_file(case.lora(), file)
    try:
        network.load_lora(file, "small", lora_network_dim=case.LORA_RANK, lora_network_alpha=case.LORA_ALPHA)
    finally:
        file.unlink()
    network.enable_loras(["small"])
    rows, mask = case.text()
    return network(
        case.noise(),
        torch.tensor([case.TIMESTEP]),
        encoder_hidden_states=rows[:1, None],
        encoder_attention_mask=mask[:1],
    )[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="folder of the public repository")
    reference = import_reference(parser.parse_args().checkout)
    TARGET.parent.mkdir(exist_ok=True)
    with torch.no_grad():
        tensors = forwards(reference)
        network = load(reference, True)
        for name, version in case.VERSIONS.items():
            tensors[f"{name}.latents"] = run(reference, network, version)
        tensors["guided.latents_uncached"] = run(reference, network, case.VERSIONS["guided"], use_cache=False)
        tensors["distilled.latents_uncached"] = run(reference, network, case.VERSIONS["distilled"], use_cache=False)
        for name, version in {
            "standard": case.Version(50, 12.0, 4.0),
            "fine": case.Version(50, 12.0, 4.0, fine_ending=True),
            "distilled": case.Version(16, 7.0, 1.0, distilled=True),
        }.items():
            tensors[f"sigmas.{name}"] = schedule(reference, version)[1].sigmas
        tensors["lora"] = with_lora(reference)
    tensors = {name: tensor.float().clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, TARGET)
    print(f"{TARGET}: {TARGET.stat().st_size // 1024} kB, {len(tensors)} tensors")


if __name__ == "__main__":
    main()

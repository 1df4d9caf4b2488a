"""Record what the public LingBot-World code computes on small random weights, as test data.

    python scripts/record_lingbot_reference.py CHECKOUT/experiments/LingBot-v2 CHECKOUT/experiments/LingBot

CHECKOUT is svg-project/Quant-VideoGen, whose copies of LingBot-World v2 and v1 (Robbyant/lingbot-world) run without
CUDA kernels; recorded from commit 0601468 with torch 2.14.1 and diffusers 0.33.1. Weights and inputs come from
tests/support/lingbot_case.py by seed. Only the attention functions are replaced, by PyTorch's in float32: the public
ones round to bfloat16, which would hide mistakes of a percent. Nothing of the public code is kept, only its numbers.
"""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import lingbot_case as case  # noqa: E402

TARGET = ROOT / "tests" / "world_models" / "data" / "lingbot_reference.safetensors"
TRAIN_STEPS, SHIFT, PIXELS = 1000, 10.0, 8


def import_reference(folder: Path) -> types.SimpleNamespace:
    """Modules of one checkout; packages whose `__init__` imports more than is needed are stood in for."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "wan"]:
        del sys.modules[name]
    for name in ("wan", "wan.modules", "wan.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    import wan.modules.attention as attention

    def plain_attention(q, k, v, *_, **__):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()

    attention.attention = attention.flash_attention = plain_attention
    import wan.modules.model_fast as network
    import wan.utils.cam_utils as camera
    import wan.utils.fm_solvers_unipc as solver

    pretrained = None
    if (folder / "wan" / "modules" / "model_causal.py").is_file():
        import wan.modules.model_causal as pretrained
    return types.SimpleNamespace(network=network, pretrained=pretrained, camera=camera, solver=solver)


def camera_of(reference, version: case.Version, act: bool = False) -> dict[str, torch.Tensor]:
    """Relative poses `[T, 4, 4]` and unshuffled rays `[1, 384, T, H, W]`, or `[1, 448, ...]` with keys."""
    height, width = case.HEIGHT * PIXELS, case.WIDTH * PIXELS
    poses = case.poses(version.poses)
    relative = reference.camera.interpolate_camera_poses(
        src_indices=np.linspace(0, len(poses) - 1, len(poses)),
        src_rot_mat=poses[:, :3, :3],
        src_trans_vec=poses[:, :3, 3],
        tgt_indices=np.linspace(0, len(poses) - 1, version.frames),
    )
    relative = reference.camera.compute_relative_poses(relative, framewise=True)
    scaled = reference.camera.get_Ks_transformed(
        torch.from_numpy(case.intrinsics(version.poses)), 480, 832, height, width, height, width
    )
    kind = {"only_rays_d": True} if act else {}
    rows = scaled[:1].repeat(len(relative), 1)
    rays = reference.camera.get_plucker_embeddings(relative, rows, height, width, **kind)
    if act:
        pressed = torch.from_numpy(case.keys(version.poses)[::4]).float()
        rays = torch.cat((rays, pressed[:, None, None].expand(-1, height, width, -1)), dim=-1)
    rays = torch.nn.functional.pixel_unshuffle(rays.movedim(-1, 1), PIXELS)
    return {"poses": relative, "rays": rays.movedim(0, 1)[None]}


def run(reference, version: case.Version, act: bool = False) -> dict[str, torch.Tensor]:
    """One rollout with the public network and scheduler, block by block, and tensors from inside of it."""
    size = {"local_attn_size": version.window or -1, "sink_size": version.sink}
    size |= {"control_type": "act"} if act else {}
    network = reference.network.WanModelFast(model_type="i2v", **size, **case.MODEL).eval()
    network.load_state_dict(case.weights({name: value.shape for name, value in network.state_dict().items()}))
    scheduler = reference.solver.FlowUniPCMultistepScheduler(
        num_train_timesteps=TRAIN_STEPS, shift=1, use_dynamic_shifting=False
    )
    scheduler.set_timesteps(TRAIN_STEPS, shift=SHIFT)
    timesteps = scheduler.timesteps[list(version.indices)]
    seen: dict[str, torch.Tensor] = {}

    def keep(name):
        def hook(module, inputs, output):
            seen.setdefault(name, output.clone())

        return hook

    def keep_camera(module, args, kwargs):
        seen.setdefault("camera_tokens", kwargs["dit_cond_dict"]["c2ws_plucker_emb"])

    network.blocks[0].register_forward_hook(keep("block"))
    network.blocks[0].self_attn.register_forward_hook(keep("self_attention"))
    network.blocks[0].register_forward_pre_hook(keep_camera, with_kwargs=True)

    camera = camera_of(reference, version, act)
    tokens = case.HEIGHT * case.WIDTH // 4
    held = tokens * (version.window or version.frames)
    caches, text_caches = empty_caches(network, held)
    condition = torch.cat((case.mask(version.frames), case.picture(version.frames)), dim=1)[0]
    latents, flows = [], []
    for block in range(version.blocks):
        part = slice(block * version.block, (block + 1) * version.block)

        def forward(x, timestep, part=part):
            return network(
                x=[x],
                t=timestep.reshape(1),
                context=[case.text()[0]],
                seq_len=version.block * tokens,
                y=[condition[:, part]],
                dit_cond_dict={"c2ws_plucker_emb": (camera["rays"][:, :, part],)},
                kv_cache=caches,
                crossattn_cache=text_caches,
                current_start=part.start * tokens,
                max_attention_size=held,
            )[0]

        latent = case.noise(version.frames)[0, :, part]
        for step, timestep in enumerate(timesteps):
            flow = forward(latent, timestep)
            if step == 0:
                flows.append(flow)
            # The noise level of a prediction: that of the first timestep nearest to its own.
            level = scheduler.sigmas[int((scheduler.timesteps - timestep).abs().argmin())]
            clean = latent - level * flow
            if step < len(timesteps) - 1:
                fresh = case.step_noise(block, step, clean[None])[0]
                latent = scheduler.add_noise(clean, fresh, timesteps[step + 1])
        forward(clean, timesteps[-1] * 0.0)
        latents.append(clean)
    return {
        **seen,
        "poses": camera["poses"],
        "rays": camera["rays"][0, :, 1:3].contiguous(),
        "flows": torch.stack(flows),
        "latents": torch.cat(latents, dim=1),
        "timesteps": timesteps,
        "levels": scheduler.sigmas,
    }


def empty_caches(network, tokens: int) -> tuple[list[dict], list[dict]]:
    """Of keys and values for so many tokens, and of the text's: one of each a layer."""
    width = case.MODEL["dim"] // case.HEADS
    caches = [
        {"k": torch.zeros(1, tokens, case.HEADS, width), "v": torch.zeros(1, tokens, case.HEADS, width)}
        | {name: torch.zeros(1, dtype=torch.long) for name in ("global_end_index", "local_end_index")}
        for _ in network.blocks
    ]
    texts = [
        {name: torch.zeros(1, 512, case.HEADS, width) for name in "kv"} | {"is_init": torch.tensor(0)}
        for _ in network.blocks
    ]
    return caches, texts


def run_pretrained(reference, version: case.Version) -> dict[str, torch.Tensor]:
    """One rollout with guidance and the public solver: each prompt with caches of its own."""
    network = reference.pretrained.WanModelFast(model_type="i2v", **case.MODEL).eval()
    network.load_state_dict(case.weights({name: value.shape for name, value in network.state_dict().items()}))
    camera = camera_of(reference, version)
    tokens = case.HEIGHT * case.WIDTH // 4
    streams = [
        (text[0], *empty_caches(network, tokens * version.frames)) for text in (case.text(), case.negative_text())
    ]
    for _, _, texts in streams:
        for cache in texts:
            cache["is_init"] = False
    condition = torch.cat((case.mask(version.frames), case.picture(version.frames)), dim=1)[0]
    scheduler = reference.solver.FlowUniPCMultistepScheduler(
        num_train_timesteps=TRAIN_STEPS, shift=1, use_dynamic_shifting=False
    )
    latents, flows = [], []
    for block in range(version.blocks):
        part = slice(block * version.block, (block + 1) * version.block)

        def forward(x, timestep, text, caches, texts, part=part):
            return network(
                x=[x],
                t=timestep.reshape(1),
                context=[text],
                seq_len=version.block * tokens,
                y=[condition[:, part]],
                dit_cond_dict={"c2ws_plucker_emb": (camera["rays"][:, :, part],)},
                kv_cache=caches,
                crossattn_cache=texts,
                current_start=part.start * tokens,
                max_attention_size=tokens * version.frames,
            )[0]

        scheduler.set_timesteps(version.steps, shift=SHIFT)
        latent = case.noise(version.frames)[0, :, part]
        for timestep in scheduler.timesteps:
            asked, other = (forward(latent, timestep, *stream) for stream in streams)
            flow = other + version.cfg * (asked - other)
            flows.append(flow)
            latent = scheduler.step(flow[None], timestep, latent[None], return_dict=False)[0][0]
        for stream in streams:
            forward(latent, scheduler.timesteps[-1] * 0.0, *stream)
        latents.append(latent)
    return {
        "flows": torch.stack(flows[:: version.steps]),
        "latents": torch.cat(latents, dim=1),
        "timesteps": scheduler.timesteps,
        "levels": scheduler.sigmas,
    }


def walk(folder: Path) -> torch.Tensor:
    """Camera-to-world matrices of key presses, by the first version's public code."""
    sys.path.insert(0, str(folder / "wan" / "utils"))
    import wasd_ijkl_to_c2ws as keys

    wasd, ijkl, _ = keys.action_string_to_wasd_ijkl(case.ACTIONS)
    pressed = keys.wasd_array_to_frame_keys(wasd, ijkl)
    return torch.from_numpy(np.stack(keys.generate_and_save_trajectory(pressed))).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("second", type=Path, help="folder experiments/LingBot-v2 of the checkout")
    parser.add_argument("first", type=Path, help="folder experiments/LingBot of the checkout")
    options = parser.parse_args()
    tensors = {}
    with torch.no_grad():
        for name, folder in (("v2", options.second), ("v1", options.first)):
            reference = import_reference(folder)
            recorded = run(reference, case.VERSIONS[name])
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in recorded.items()}
            if reference.pretrained is None:
                recorded = run(reference, case.VERSIONS[name], act=True)
                kept = ("rays", "camera_tokens", "flows", "latents")
                tensors |= {f"act.{part}": recorded[part].contiguous() for part in kept}
            else:
                recorded = run_pretrained(reference, case.PRETRAIN)
                tensors |= {f"pretrain.{part}": tensor.contiguous() for part, tensor in recorded.items()}
    tensors["walk"] = walk(options.first)
    TARGET.parent.mkdir(exist_ok=True)
    save_file(tensors, TARGET)
    print(f"{TARGET}: {TARGET.stat().st_size // 1024} kB, {len(tensors)} tensors")


if __name__ == "__main__":
    main()

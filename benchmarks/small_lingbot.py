"""Write a LingBot-World with random weights, and a Wan VAE for it, so small that a CPU runs a whole graph in a minute.

    python -m benchmarks.small_lingbot FOLDER

FOLDER is a ComfyUI models folder. The checkpoint has the names, the parts and the shapes of a published one, apart from
its sizes: 2 layers of 2 heads, and text 64 wide, as Tiny World Conditioning gives it in place of a text encoder. Its
pictures are noise: it is for trying graphs, not for looking at.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from .host import load_pack, start_host

CHECKPOINT = "lingbot-world-v2-1.3b-causal-fast"
VAE = "wan_2.1_vae.safetensors"
PARTS = 2
SIZES = {"in_dim": 36, "dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 2, "text_dim": 64}
VAE_WIDTH = 8


def write(models: Path) -> tuple[str, str]:
    """Write both into a models folder; returns (name of the first part, name of the VAE) as the loaders list them."""
    start_host()
    load_pack()
    import comfy.ops
    from quantwm_pack.world_models.lingbot.network import LingBotModel

    network = LingBotModel(
        **SIZES, device="meta", dtype=torch.bfloat16, operations=comfy.ops.disable_weight_init
    ).state_dict()
    folder = models / "diffusion_models" / CHECKPOINT
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.bfloat16() for name, tensor in shaped_randomly(network).items()}
    names = [f"model-{part + 1:05d}-of-{PARTS:05d}.safetensors" for part in range(PARTS)]
    for part, name in enumerate(names):
        save_file({key: weights[key] for key in list(weights)[part::PARTS]}, folder / name)
    return f"{CHECKPOINT}/{names[0]}", write_vae(models)


def write_vae(models: Path) -> str:
    """Write a small Wan VAE; returns its name."""
    import comfy.ldm.wan.vae

    vae = comfy.ldm.wan.vae.WanVAE(
        dim=VAE_WIDTH,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        attn_scales=[],
        temperal_downsample=[False, True, True],
    )
    (models / "vae").mkdir(parents=True, exist_ok=True)
    save_file(shaped_randomly(vae.state_dict()), models / "vae" / VAE)
    return VAE


def shaped_randomly(shapes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights that keep the size of what goes through them; gains near 1."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, value in shapes.items():
        noise = torch.randn(value.shape, generator=generator)
        is_gain = name.endswith("gamma") or ("norm" in name and name.endswith("weight"))
        fan_in = 1 if value.ndim < 2 else value.numel() / len(value)
        made[name] = 1 + 0.1 * noise if is_gain else noise * (0.1 if value.ndim < 2 else fan_in**-0.5)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, help="a ComfyUI models folder")
    print(*write(parser.parse_args().models), sep="\n")


if __name__ == "__main__":
    main()

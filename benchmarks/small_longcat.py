"""Write a LongCat-Video with random weights, and a Wan VAE for it, so small that a CPU runs a whole graph in a minute.

    python -m benchmarks.small_longcat FOLDER

FOLDER is a ComfyUI models folder. The checkpoint lies there as the official download does, `dit/` in parts beside
`scheduler/`, and once more under the names of the repack; with it a LoRA in the published layout. It has 2 layers of 2
heads, and text 64 wide, as Tiny World Conditioning gives it in place of a text encoder. Its pictures are noise: it is
for trying graphs, not for looking at.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from .host import load_pack, start_host
from .small_lingbot import shaped_randomly, write_vae

OFFICIAL = "LongCat-Video"
REPACK = "LongCat_TI2V_comfy_fp8_e4m3fn_scaled_KJ.safetensors"
LORA = "cfg_step_lora.safetensors"
PARTS, LORA_RANK, HEAD_DIM, PATCH = 2, 4, 128, 2
# Names as the public class has them.
SIZES = {
    "hidden_size": 256,
    "depth": 2,
    "num_heads": 2,
    "caption_channels": 64,
    "adaln_tembed_dim": 64,
    "frequency_embedding_size": 256,
}
FFN = 768


def official_shapes(sizes: dict[str, int], ffn: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the public class's parameters, by its names."""
    dim, step = sizes["hidden_size"], sizes["adaln_tembed_dim"]
    layers = {
        "x_embedder.proj": (dim, 16, 1, PATCH, PATCH),
        "t_embedder.mlp.0": (step, sizes["frequency_embedding_size"]),
        "t_embedder.mlp.2": (step, step),
        "y_embedder.y_proj.0": (dim, sizes["caption_channels"]),
        "y_embedder.y_proj.2": (dim, dim),
        "final_layer.linear": (16 * PATCH * PATCH, dim),
        "final_layer.adaLN_modulation.1": (2 * dim, step),
    }
    made = {}
    for block in range(sizes["depth"]):
        at = f"blocks.{block}"
        layers |= {f"{at}.adaLN_modulation.1": (6 * dim, step), f"{at}.attn.qkv": (3 * dim, dim)}
        layers |= {f"{at}.attn.proj": (dim, dim), f"{at}.pre_crs_attn_norm": (dim,)}
        layers |= {f"{at}.cross_attn.q_linear": (dim, dim), f"{at}.cross_attn.kv_linear": (2 * dim, dim)}
        layers |= {f"{at}.cross_attn.proj": (dim, dim)}
        norms = [f"{at}.{part}.{side}_norm.weight" for part in ("attn", "cross_attn") for side in "qk"]
        made |= dict.fromkeys(norms, (dim // sizes["num_heads"],))
        made |= {f"{at}.ffn.{name}.weight": (dim, ffn) if name == "w2" else (ffn, dim) for name in ("w1", "w2", "w3")}
    for name, shape in layers.items():
        made |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return made


def write(models: Path) -> tuple[str, str, str]:
    """Write all into a models folder; returns the names of the official checkpoint, the repack and the VAE."""
    start_host()
    load_pack()
    from quantwm_pack.world_models.longcat.checkpoint import network_weights

    shapes = {name: torch.empty(shape) for name, shape in official_shapes(SIZES, FFN).items()}
    weights = {name: tensor.bfloat16() for name, tensor in shaped_randomly(shapes).items()}
    folder = models / "diffusion_models"
    for part, settings in (
        ("dit/config.json", {"_class_name": "LongCatVideoTransformer3DModel", "text_tokens_zero_pad": True}),
        ("scheduler/scheduler_config.json", {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 12.0}),
    ):
        file = folder / OFFICIAL / part
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings), encoding="utf-8")
    names = [
        f"{OFFICIAL}/dit/diffusion_pytorch_model-{part + 1:05d}-of-{PARTS:05d}.safetensors" for part in range(PARTS)
    ]
    for part, name in enumerate(names):
        save_file({key: weights[key] for key in list(weights)[part::PARTS]}, folder / name)
    renamed = network_weights(weights, REPACK)
    save_file({name: tensor.contiguous() for name, tensor in renamed.items()}, folder / REPACK)
    (models / "loras").mkdir(exist_ok=True)
    save_file(official_lora({"blocks.0.attn.qkv": 3}), models / "loras" / LORA)
    return names[0], REPACK, write_vae(models)


def official_lora(targets: dict[str, int]) -> dict[str, torch.Tensor]:
    """A LoRA in the published layout for square projections, with how many parts each joins."""
    generator, dim, made = torch.Generator().manual_seed(0), SIZES["hidden_size"], {}
    for target, parts in targets.items():
        name = "lora___lorahyphen___" + target.replace(".", "___lorahyphen___")
        made[f"{name}.lora_down.weight"] = torch.randn(parts * LORA_RANK, dim, generator=generator) / dim**0.5
        for part in range(parts):
            made[f"{name}.lora_up.blocks.{part}.weight"] = torch.randn(dim, LORA_RANK, generator=generator)
        made[f"{name}.alpha_scale"] = torch.tensor(0.5)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, help="a ComfyUI models folder")
    print(*write(parser.parse_args().models), sep="\n")


if __name__ == "__main__":
    main()

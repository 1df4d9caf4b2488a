"""LoRAs in LongCat-Video's own layout, for the host's LoRA loading.

They name modules as the official checkpoint does, and give joined projections one down matrix for all parts and an up
matrix for each. LoRAs under the repack's names need nothing of this: the host's LoRA loaders take them.
"""

from __future__ import annotations

from typing import Any

import comfy.sd
import comfy.utils
import torch

from .checkpoint import renamed
from .network import LongCatModel

PREFIX, DOT = "lora___lorahyphen___", "___lorahyphen___"
DOWN = ".lora_down.weight"


def with_lora(model: Any, path: str, strength: float):
    """A clone of a LongCat-Video MODEL with the LoRA in a file, applied by the host.

    Raises:
        ValueError: when the model is another, or the LoRA fits none of its layers.
    """
    if not isinstance(getattr(model.model, "diffusion_model", None), LongCatModel):
        raise ValueError(
            f"LongCat LoRA is for LongCat-Video; this is {type(model.model).__name__}. Use Load LoRA for others."
        )
    lora = comfy.utils.load_torch_file(path, safe_load=True)
    if is_official_lora(lora):
        lora = host_lora(lora)
    changed, _ = comfy.sd.load_lora_for_models(model, None, lora, strength, 0.0)
    if _count(changed) == _count(model):
        raise ValueError(
            f"{path} fits no layer of LongCat-Video; its first weight is called {next(iter(lora), None)!r}. Take a "
            "LoRA that was made for LongCat-Video."
        )
    return changed


def _count(model: Any) -> int:
    return sum(len(patches) for patches in model.patches.values())


def is_official_lora(lora: dict[str, torch.Tensor]) -> bool:
    return any(key.startswith(PREFIX) and key.endswith(DOWN) for key in lora)


def host_lora(lora: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same LoRA under names that the host's loader knows.

    Raises:
        ValueError: when parts of a module are missing.
    """
    made = {}
    for name in [key.removesuffix(DOWN) for key in lora if key.endswith(DOWN)]:
        module = name.removeprefix(PREFIX).replace(DOT, ".")
        targets = [target.removesuffix(".weight") for target in renamed(f"{module}.weight")]
        scale = lora.get(f"{name}.alpha_scale", torch.tensor(1.0))
        for target, (down, up) in zip(targets, _parts(lora, name, len(targets)), strict=True):
            made |= {
                f"diffusion_model.{target}.lora_down.weight": down,
                f"diffusion_model.{target}.lora_up.weight": up,
                # The host divides by the rank.
                f"diffusion_model.{target}.alpha": scale.float() * down.shape[0],
            }
    return made


def _parts(lora: dict[str, torch.Tensor], name: str, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Down and up matrices of each part of a module that joins `count` of them."""
    down, whole = lora[name + DOWN], lora.get(f"{name}.lora_up.weight")
    if whole is not None:
        return [(down, up.contiguous()) for up in whole.chunk(count)]
    ups = [lora.get(f"{name}.lora_up.blocks.{part}.weight") for part in range(count)]
    if any(up is None for up in ups):
        raise ValueError(f"this LoRA has {name}{DOWN}, but not the {count} up matrices of that module. Get it again.")
    return [(part.contiguous(), up) for part, up in zip(down.chunk(count), ups)]

"""A LongCat-Video so small that the public code runs it on a CPU in seconds: weights and inputs by seed, float32.

`scripts/record_longcat_reference.py` gives these to the public code and stores what comes out; the tests give them to
ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.small_longcat import official_shapes

WEIGHTS_SEED, NOISE_SEED, LORA_SEED = 21, 22, 23
# Names as the public class has them.
MODEL = {
    "hidden_size": 256,
    "depth": 3,
    "num_heads": 2,
    "caption_channels": 24,
    "adaln_tembed_dim": 64,
    "frequency_embedding_size": 256,
}
HEADS, FFN, TEXT_WIDTH, TEXT_TOKENS = 2, 768, 24, 512
PROMPT_TOKENS, NEGATIVE_TOKENS = 20, 7
HEIGHT, WIDTH, PATCH = 4, 6, 2  # of a latent frame: 6 tokens
FRAMES, GIVEN = 6, 2
TIMESTEP = 994.7  # 996 in bfloat16
LORA_RANK, LORA_ALPHA = 4, 2
LORA_TARGETS = {"blocks.0.attn.qkv": 3, "blocks.1.cross_attn.kv_linear": 2, "blocks.2.ffn.w1": 1}


@dataclass(frozen=True)
class Version:
    """How a segment is continued."""

    steps: int
    shift: float
    cfg: float
    distilled: bool = False
    fine_ending: bool = False


VERSIONS = {
    "guided": Version(steps=6, shift=12.0, cfg=4.0),
    "fine": Version(steps=4, shift=12.0, cfg=4.0, fine_ending=True),
    "distilled": Version(steps=4, shift=7.0, cfg=1.0, distilled=True),
}


def weights() -> dict[str, torch.Tensor]:
    """Random weights under the public class's names."""
    generator = torch.Generator().manual_seed(WEIGHTS_SEED)
    made = {}
    for name, shape in sorted(official_shapes(MODEL, FFN).items()):
        noise = torch.randn(shape, generator=generator)
        if noise.ndim == 1:
            # Gains of norms are all that is a vector and called a weight. Large ones let attention choose.
            made[name] = 0.1 * noise + (2.0 if name.endswith("weight") else 0.0)
        else:
            made[name] = noise / (noise.numel() / len(noise)) ** 0.5
    return made


def lora() -> dict[str, torch.Tensor]:
    """A LoRA in the published layout: joined projections have one down matrix for all parts and one up for each."""
    generator = torch.Generator().manual_seed(LORA_SEED)
    width = MODEL["hidden_size"]
    made = {}
    for target, parts in LORA_TARGETS.items():
        name = "lora___lorahyphen___" + target.replace(".", "___lorahyphen___")
        made[f"{name}.lora_down.weight"] = torch.randn(parts * LORA_RANK, width, generator=generator) / width**0.5
        out = width if parts > 1 else FFN
        ups = [torch.randn(out, LORA_RANK, generator=generator) for _ in range(parts)]
        if parts == 1:
            made[f"{name}.lora_up.weight"] = ups[0]
        else:
            made |= {f"{name}.lora_up.blocks.{part}.weight": up for part, up in enumerate(ups)}
        made[f"{name}.alpha_scale"] = torch.tensor(LORA_ALPHA / LORA_RANK)
    return made


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt and negative prompt `[2, 512, width]` with zeros behind them, and a mask int `[2, 512]` of their rows."""
    rows = torch.randn(2, TEXT_TOKENS, TEXT_WIDTH, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(2, TEXT_TOKENS, dtype=torch.int64)
    mask[0, :PROMPT_TOKENS] = mask[1, :NEGATIVE_TOKENS] = 1
    return rows * mask[..., None], mask


def noise(frames: int = FRAMES) -> torch.Tensor:
    """Noise `[1, 16, frames, H, W]` that a run begins with."""
    return torch.randn(1, 16, frames, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(NOISE_SEED))


def given() -> torch.Tensor:
    """Normalised latent `[1, 16, GIVEN, H, W]` of the frames to continue."""
    return torch.randn(1, 16, GIVEN, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(2))

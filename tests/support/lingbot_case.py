"""A LingBot-World so small that the public code runs it on a CPU in seconds: weights and inputs by seed, float32.

`scripts/record_lingbot_reference.py` gives these to the public code and stores what comes out; the tests give them to
ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

WEIGHTS_SEED, NOISE_SEED, RUN_SEED = 11, 12, 13
HEADS, TEXT_WIDTH, TEXT_TOKENS = 2, 24, 8
MODEL = {
    "in_dim": 36,
    "out_dim": 16,
    "dim": 256,
    "ffn_dim": 320,
    "freq_dim": 256,
    "text_dim": TEXT_WIDTH,
    "num_heads": HEADS,
    "num_layers": 3,
}
HEIGHT, WIDTH = 4, 6  # of a latent frame: 6 tokens
ACTIONS = "w-3,iw-2,none-1,ald-4,sj-2,k-3,wl-4"


@dataclass(frozen=True)
class Version:
    """How one of the published models is sampled; windows are shorter than the published ones, so that they roll.

    steps: along one path, in place of few by `indices`.
    """

    block: int
    blocks: int
    indices: tuple[int, ...]
    window: int
    sink: int
    poses: int
    steps: int = 0
    cfg: float = 1.0

    @property
    def frames(self) -> int:
        return self.block * self.blocks


VERSIONS = {
    # 49 poses are 13 latent frames, of which 12 make whole blocks: the path is stretched.
    "v2": Version(block=4, blocks=3, indices=(0, 250, 500, 750), window=7, sink=2, poses=49),
    "v1": Version(block=3, blocks=2, indices=(0, 179, 358, 679), window=0, sink=0, poses=21),
}
PRETRAIN = Version(block=4, blocks=2, indices=(), window=0, sink=0, poses=33, steps=40, cfg=5.0)


def weights(shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Random weights for parameters of these names and shapes."""
    generator = torch.Generator().manual_seed(WEIGHTS_SEED)
    made = {}
    for name in sorted(shapes):
        noise = torch.randn(shapes[name], generator=generator)
        if noise.ndim == 1:
            # Gains of norms stay near 1. They are all that is a vector and called a weight.
            made[name] = 0.1 * noise + name.endswith("weight")
        elif name.endswith("modulation"):
            made[name] = 0.5 * noise
        else:
            made[name] = noise / (noise.numel() / len(noise)) ** 0.5
    return made


def text() -> torch.Tensor:
    """Text `[1, tokens, width]`, much shorter than the 512 rows that the model attends to."""
    return torch.randn(1, TEXT_TOKENS, TEXT_WIDTH, generator=torch.Generator().manual_seed(1))


def negative_text() -> torch.Tensor:
    """Text `[1, tokens, width]` that guidance leads away from."""
    return torch.randn(1, TEXT_TOKENS + 3, TEXT_WIDTH, generator=torch.Generator().manual_seed(3))


def noise(frames: int) -> torch.Tensor:
    """Noise `[1, 16, frames, H, W]` that a run begins with."""
    return torch.randn(1, 16, frames, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(NOISE_SEED))


def step_noise(block: int, step: int, like: torch.Tensor) -> torch.Tensor:
    """What the host's sampler adds after a step."""
    torch.manual_seed(RUN_SEED + block * 1000 + step)
    return torch.randn_like(like)


def picture(frames: int) -> torch.Tensor:
    """Normalised latent `[1, 16, frames, H, W]` of the start picture and the grey frames behind it."""
    return torch.randn(1, 16, frames, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(2))


def mask(frames: int) -> torch.Tensor:
    """`[1, 4, frames, H, W]`: 1 where the picture is given."""
    given = torch.zeros(1, 4, frames, HEIGHT, WIDTH)
    given[:, :, 0] = 1
    return given


def poses(count: int) -> np.ndarray:
    """A bent walk through nowhere in particular: camera-to-world matrices float32 `[count, 4, 4]`."""
    from scipy.spatial.transform import Rotation

    t = np.linspace(0, 1, count)
    turns = Rotation.from_euler("YXZ", np.stack((80 * t**2, 15 * np.sin(5 * t), 4 * t), axis=1), degrees=True)
    made = np.tile(np.eye(4), (count, 1, 1))
    made[:, :3, :3] = (Rotation.from_euler("YXZ", (30, 10, 5), degrees=True) * turns).as_matrix()
    made[:, :3, 3] = np.stack((3 * np.sin(2 * t) - 15, -5 + 0.4 * t, 6 * t**1.5 + 2), axis=1)
    return made.astype(np.float32)


def keys(count: int) -> np.ndarray:
    """Which of w, a, s, d are pressed, int32 `[count, 4]` as in the public examples."""
    pressed = torch.randint(0, 2, (count, 4), generator=torch.Generator().manual_seed(4))
    return pressed.numpy().astype(np.int32)


def intrinsics(count: int) -> np.ndarray:
    """Focal lengths and axis in pixels of 832 x 480, float32 `[count, 4]`; only the first row may matter."""
    rows = np.tile(np.array([415.5, 417.25, 410.0, 236.5], dtype=np.float32), (count, 1))
    rows[1:] *= 1.5
    return rows

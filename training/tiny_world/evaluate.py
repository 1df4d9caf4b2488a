"""What a pair of weight files is worth, measured through ComfyUI's own sampler."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from .plan import Plan
from .rollout import Rollout, Worlds, make_worlds

_FIELD_OF_VIEW = 80.0


@dataclass(frozen=True)
class Measures:
    """Means over test worlds; dB against the true frames, so the codec's own error is in every number."""

    codec_db: float
    """Seed frames through the codec and back."""
    generated_db: float
    """All generated frames after a short seed, also of walls that no model can know."""
    revisit_db: float
    """Frames generated after a seed of more than a full turn: everything in them has been shown."""
    revisit_short_db: float
    """Views of a short seed that come back after a full turn, generated walls in between."""
    sharpness: float
    """Gradient energy of walls never seen, generated over true; 1 is as sharp as the truth."""

    def row(self, name: str) -> str:
        """One line of the table that `HEADER` heads."""
        numbers = (self.codec_db, self.generated_db, self.revisit_db, self.revisit_short_db, self.sharpness)
        return f"{name:12s}" + "".join(f"{number:12.2f}" for number in numbers)

    def facts(self) -> dict[str, str]:
        """For the metadata of a weight file."""
        return {name: f"{value:.2f}" for name, value in asdict(self).items()}


HEADER = f"{'weights':12s}" + "".join(
    f"{title:>12s}" for title in ("codec dB", "generated", "revisit", "rev. short", "sharpness")
)


def measure(plan: Plan, world_file: Path, codec_file: Path, preview: Path | None = None, block: int = 3) -> Measures:
    """Run the test worlds once; write true frames above generated ones to `preview`."""
    rollout = Rollout(world_file, codec_file)
    fast = make_worlds(plan.eval_worlds, plan.eval_frames, seed=10**6 + 1, slowest=18.0)
    long = rollout(fast, plan.long_seed, block)
    short = rollout(fast, plan.short_seed, block)
    if preview is not None:
        _save_preview(preview, fast, long, short)
    turn = 360.0 / fast.motion.turn_rate.abs()
    time = torch.arange(plan.eval_frames).expand(plan.eval_worlds, -1)
    generated = time >= plan.short_seed
    back = (time >= turn[:, None]) & (time - turn[:, None] <= plan.short_seed - 1)
    return Measures(
        codec_db=_mean(_psnr(rollout.reconstruct(fast.frames), fast.frames)),
        generated_db=_mean(_psnr(short, fast.frames)[generated]),
        revisit_db=_mean(_psnr(long, fast.frames)[(time >= plan.long_seed) & (time >= turn[:, None])]),
        revisit_short_db=_mean(_psnr(short, fast.frames)[back & generated]),
        sharpness=_sharpness(short, fast, plan.short_seed),
    )


def _psnr(frames: Tensor, truth: Tensor) -> Tensor:
    """dB of each frame, [N, T]."""
    error = (frames.float() - truth).square().mean((2, 3, 4)).clamp_min(1e-10)
    return -10 * error.log10()


def _mean(values: Tensor) -> float:
    return values.mean().item() if values.numel() else math.nan


def _sharpness(frames: Tensor, worlds: Worlds, seed_frames: int) -> float:
    """Gradient energy over the truth's in the frames in which nothing is seen that was seen before."""
    turned = worlds.motion.turn_rate.abs()[:, None] * torch.arange(frames.shape[1])
    last_seed = turned[:, seed_frames - 1 : seed_frames]
    unseen = (turned - last_seed >= _FIELD_OF_VIEW) & (360 - turned >= _FIELD_OF_VIEW)
    if not unseen.any():
        return math.nan
    return (_gradient_energy(frames[unseen]) / _gradient_energy(worlds.frames[unseen])).item()


def _gradient_energy(images: Tensor) -> Tensor:
    across, down = images.diff(dim=2), images.diff(dim=1)
    return across.square().mean() + down.square().mean()


def _save_preview(path: Path, worlds: Worlds, long: Tensor, short: Tensor, shown: int = 2) -> None:
    """Two worlds with the long seed, then two with the short one; every third frame, half size."""
    rows = []
    for generated in (long, short):
        for index in range(min(shown, len(generated))):
            rows += [_strip(worlds.frames[index]), _strip(generated[index])]
    picture = (torch.cat(rows).clamp(0, 1) * 255).byte().cpu().numpy()
    Image.fromarray(picture).save(path)


def _strip(clip: Tensor) -> Tensor:
    frames = clip[::3].float().movedim(-1, 1)
    halved = torch.nn.functional.interpolate(frames, scale_factor=0.5, mode="area")
    return torch.cat(list(halved.movedim(1, -1)), dim=1)

"""LPIPS for Compare Worlds, where everything it needs is on this machine already. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

# What AlexNet's strides and pooling leave at least one pixel of.
SMALLEST = 31


def lpips_scorer(like: torch.Tensor) -> tuple[Callable[[torch.Tensor, torch.Tensor], float] | None, str | None]:
    """A function giving LPIPS (AlexNet) of two frames `[H, W, 3]` in 0..1; or None, and what is missing.

    like: frames `[T, H, W, C]` of the size and on the device of those to come.
    """
    if find_spec("torchmetrics") is None or find_spec("torchvision") is None:
        return None, "it needs the Python package torchmetrics"
    from torchvision.models import AlexNet_Weights

    name = AlexNet_Weights.DEFAULT.url.rpartition("/")[2]
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    if not (folder / name).is_file():
        return None, f"it needs AlexNet's weights, {name}, in torch's hub/checkpoints folder"
    if min(like.shape[1:3]) < SMALLEST:
        return None, f"it needs frames of at least {SMALLEST} x {SMALLEST} pixels"
    from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

    metric = LearnedPerceptualImagePatchSimilarity(net_type="alex", normalize=True).to(like.device)

    def score(first: torch.Tensor, second: torch.Tensor) -> float:
        return float(metric(first.movedim(-1, 0)[None], second.movedim(-1, 0)[None]))

    return score, None

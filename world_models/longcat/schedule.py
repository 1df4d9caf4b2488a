"""The noise levels of a run. Facts: the public pipeline of LongCat-Video."""

from __future__ import annotations

import numpy as np
import torch

STEPS = 1000
LAST = 0.001
# The distilled steps are picks from 50 evenly spaced ones.
DISTILLED_FROM = 50
DISTILLED_STEPS = 16
# With the fine ending, levels at and below the middle are replaced by ten even steps.
MIDDLE, ENDING_STEPS = 0.5, 10


def shifted(levels: torch.Tensor, shift: float) -> torch.Tensor:
    """Levels moved towards noise: s x / (1 + (s - 1) x)."""
    return shift * levels / (1 + (shift - 1) * levels)


def sigmas(steps: int, shift: float, fine_ending: bool = False) -> torch.Tensor:
    """Float32 noise levels of `steps` steps, from 1, ending in 0.

    fine_ending: ten even steps from the middle on in place of what the shift leaves there, so their number changes: 50
        become 56 at a shift of 12. The published continuation has it on by default.
    """
    levels = shifted(torch.linspace(1, LAST, steps), shift)
    if fine_ending:
        ending = np.linspace(MIDDLE * STEPS, 0, ENDING_STEPS, dtype=np.float32, endpoint=False)
        levels = torch.cat((levels[levels * STEPS > MIDDLE * STEPS], torch.from_numpy(ending) / STEPS))
    return torch.cat((levels, torch.zeros(1)))


def distilled_sigmas(steps: int, shift: float) -> torch.Tensor:
    """Noise levels for the distillation LoRA, 16 steps as published.

    Raises:
        ValueError: for more steps than there are levels to pick from.
    """
    if not 1 <= steps <= DISTILLED_FROM:
        raise ValueError(
            f"the distilled schedule picks its steps from {DISTILLED_FROM}; got {steps}. Use {DISTILLED_STEPS}, which "
            "the LoRA was trained for."
        )
    even = torch.arange(DISTILLED_FROM, 0, -1) * (STEPS // DISTILLED_FROM) / STEPS
    picks = np.floor(np.linspace(0, DISTILLED_FROM, steps, endpoint=False)).astype(np.int64)
    return torch.cat((shifted(even[picks], shift), torch.zeros(1)))

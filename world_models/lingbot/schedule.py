"""The few-step schedules that LingBot-World was distilled on, and how its timesteps and noise levels belong together.

Facts: the public code of LingBot-World (Robbyant/lingbot-world) and its copy in Quant-VideoGen. Training has 1000 noise
levels, shifted by 10; the network is told their timesteps cut to whole numbers, and several neighbouring levels share
one. A timestep stands for its first level when a prediction is turned into a clean picture, and for its second when
noise is added again.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

LEVELS = 1000
SHIFT = 10.0


@lru_cache(maxsize=4)
def noise_levels(shift: float = SHIFT) -> tuple[np.ndarray, np.ndarray]:
    """Noise levels float32 `[1000]` from high to low, and their timesteps int `[1000]`."""
    highest = float(np.float32(1 - 1 / LEVELS))
    plain = np.linspace(highest, 0.0, LEVELS + 1)[:-1]
    shifted = shift * plain / (1 + (shift - 1) * plain)
    return shifted.astype(np.float32), (shifted * LEVELS).astype(np.int64)


def denoise_levels(shift: float = SHIFT) -> np.ndarray:
    """Float32 `[1000]`: the level by which a prediction at each timestep is undone; NaN where no level has it."""
    levels, timesteps = noise_levels(shift)
    table = np.full(LEVELS, np.nan, dtype=np.float32)
    table[timesteps[::-1]] = levels[::-1]  # the first of those that share a timestep is written last
    return table


def few_step_sigmas(indices: tuple[int, ...], shift: float = SHIFT) -> list[float]:
    """Sigmas of a run at the levels `indices`, ending in 0: each the level at which noise is added before that step.

    The first is 1: a run begins with noise alone.
    """
    levels, timesteps = noise_levels(shift)
    sigmas = [1.0]
    for index in indices[1:]:
        sharing = np.flatnonzero(timesteps == timesteps[index])
        sigmas.append(float(levels[sharing[min(1, len(sharing) - 1)]]))
    return [*sigmas, 0.0]

"""LingBot-World's schedules, of few steps or along a path, and how its timesteps and noise levels belong together.

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
    shifted = _evenly(LEVELS, shift)
    return shifted.astype(np.float32), (shifted * LEVELS).astype(np.int64)


def path_sigmas(steps: int, shift: float = SHIFT) -> list[float]:
    """Sigmas of a run of `steps` steps along one path, ending in 0, for models that are not distilled."""
    return [*_evenly(steps, shift).astype(np.float32).tolist(), 0.0]


def _evenly(steps: int, shift: float) -> np.ndarray:
    """Noise levels float64 `[steps]` from the highest of training down, evenly spaced before they are shifted."""
    highest = float(np.float32(1 - 1 / LEVELS))
    plain = np.linspace(highest, 0.0, steps + 1)[:-1]
    return shift * plain / (1 + (shift - 1) * plain)


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

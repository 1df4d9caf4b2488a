"""UniPC of second order (arXiv 2302.04867), for models that follow one path from noise to picture.

With data prediction, coefficients expm1 (the paper's B2), first order in the first and in the last step, on flow
models: a latent at level s is (1 - s) times the picture plus s times the noise. Facts: FlowUniPCMultistepScheduler of
Wan 2.1's public code, with which LingBot-World's causal-pretrain is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# The half log-SNR of noise alone is infinite.
HIGHEST = 1 - 1e-6


class UniPC:
    """The path of one block through the noise levels `sigmas`, which fall."""

    def __init__(self, sigmas: Sequence[float]) -> None:
        self._sigmas = [min(float(sigma), HIGHEST) for sigma in sigmas]
        self._step = 0
        # Where the step before began, the pictures predicted there and before that, and the order it was made in.
        self._begun: torch.Tensor | None = None
        self._pictures: list[torch.Tensor] = []
        self._order = 1

    def step(self, latent: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
        """The latent at the next level, from `latent` at this one and the picture that was predicted from it."""
        if self._begun is not None:
            latent = self._advance(self._step - 1, self._begun, self._order, picture)
        self._pictures = [*self._pictures[-1:], picture]
        left = len(self._sigmas) - 1 - self._step
        self._order = min(2, left, len(self._pictures))
        self._begun = latent
        self._step += 1
        return self._advance(self._step - 1, latent, self._order)

    def _advance(
        self, index: int, latent: torch.Tensor, order: int, reached: torch.Tensor | None = None
    ) -> torch.Tensor:
        """From level `index` to the next, predicted, or corrected by the picture that was `reached` there."""
        level, following = self._sigmas[index], self._sigmas[index + 1]
        length = _half_log_snr(following) - _half_log_snr(level)
        weight = (1 - following) * math.expm1(-length)
        known = self._pictures[-1]
        moved = (following / level) * latent - weight * known
        slopes, places = [], []
        if order == 2:
            place = (_half_log_snr(self._sigmas[index - 1]) - _half_log_snr(level)) / length
            slopes.append((self._pictures[-2] - known) / place)
            places.append(place)
        if reached is not None:
            slopes.append(reached - known)
            places.append(1.0)
        for share, slope in zip(_shares(places, length), slopes):
            moved = moved - weight * share * slope
        return moved


def _half_log_snr(sigma: float) -> float:
    return math.inf if sigma == 0 else math.log((1 - sigma) / sigma)


def _shares(places: Sequence[float], length: float) -> list[float]:
    """Weights of the slopes at `places` along a step of `length`: they make the step exact to one order more."""
    if len(places) < 2:
        # Half of one slope, as the paper simplifies both first cases.
        return [0.5] * len(places)
    growth = math.expm1(-length)
    first = growth / -length - 1
    second = first / -length - 0.5
    ours, theirs = first / growth, 2 * second / growth
    # [[1, 1], [place, 1]] @ shares = [ours, theirs]
    share = (theirs - ours) / (places[0] - 1)
    return [share, ours - share]

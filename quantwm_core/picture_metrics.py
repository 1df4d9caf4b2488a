"""How far apart two pictures are, in plain torch: PSNR, SSIM, and the flicker between two pairs of them.

Pictures are float `[H, W, C]` with values in 0..1.
"""

from __future__ import annotations

import math

import torch

# Equal pictures have no finite ratio; this stands for it, in decibels.
PSNR_CEILING = 100.0
WINDOW, SIGMA = 11, 1.5
LEVELS = 255


def psnr(squared_error: float) -> float:
    """Peak signal-to-noise ratio in dB of a mean squared error of pictures in 0..1, at most `PSNR_CEILING`."""
    if squared_error <= 0:
        return PSNR_CEILING
    return min(PSNR_CEILING, -10 * math.log10(squared_error))


def ssim(first: torch.Tensor, second: torch.Tensor) -> float:
    """Structural similarity of two pictures, 1 for equal ones: mean over all pixels and channels.

    Gaussian windows of 11 pixels and sigma 1.5, K1 = 0.01, K2 = 0.03 (Wang et al. 2004, IEEE TIP 13(4), section III);
    edges are mirrored, as torchmetrics does it, so that figures can be compared with those of others.
    """
    a, b = first.float().movedim(-1, 0), second.float().movedim(-1, 0)
    # Sums of shifted planes: many times faster than a convolution on CPUs, and in full float32 on every device.
    means = _blurred(_blurred(torch.stack((a, b, a * a, b * b, a * b)), -2), -1)
    mean_a, mean_b, square_a, square_b, product = means
    c1, c2 = 0.01**2, 0.03**2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a.square() + mean_b.square() + c1)
    covariance = product - mean_a * mean_b
    variances = square_a - mean_a.square() + square_b - mean_b.square()
    return float((luminance * (2 * covariance + c2) / (variances + c2)).mean())


def flicker(difference: torch.Tensor, before: torch.Tensor) -> float:
    """How much the difference of two videos changes from one frame to the next, in levels of 8 bits (0..255).

    The mean of |d_t - d_(t-1)|, where d_t is one video minus the other at frame t. A constant shift of all colours
    does not flicker, and motion that both videos share cancels. The derivative of the error is what dtSSD takes
    (Erofeev et al., BMVC 2015), the mean of absolute values over consecutive frames what VBench does for still scenes
    (Huang et al., arXiv 2311.17982).
    """
    return LEVELS * float((difference - before).abs().mean())


def _blurred(planes: torch.Tensor, axis: int) -> torch.Tensor:
    """Gaussian mean along an axis, mirrored at its ends."""
    steps = [math.exp(-((i - WINDOW // 2) ** 2) / (2 * SIGMA**2)) for i in range(WINDOW)]
    length, reach = planes.shape[axis], WINDOW // 2
    start = planes.narrow(axis, 1, reach).flip(axis)
    end = planes.narrow(axis, length - 1 - reach, reach).flip(axis)
    planes = torch.cat((start, planes, end), dim=axis)
    total = planes.narrow(axis, 0, length) * (steps[0] / sum(steps))
    for i in range(1, WINDOW):
        total.add_(planes.narrow(axis, i, length), alpha=steps[i] / sum(steps))
    return total

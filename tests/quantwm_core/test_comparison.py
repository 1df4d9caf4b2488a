"""Picture metrics against torchmetrics and plain float64, and what a comparison of two videos says."""

import json
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from quantwm_core.comparison import compare, comparison_report
from quantwm_core.picture_metrics import flicker, psnr, ssim


def videos(frames: int = 5, height: int = 37, width: int = 53, channels: int = 3, noise: float = 0.1):
    generator = torch.Generator().manual_seed(frames + height)
    first = torch.rand(frames, height, width, channels, generator=generator)
    error = noise * torch.randn(first.shape, generator=generator)
    return first, (first + error).clamp(0, 1)


@pytest.mark.parametrize(("height", "width"), [(11, 11), (12, 45), (37, 53), (128, 192)])
@pytest.mark.parametrize("noise", [0.0, 0.003, 0.3])
def test_psnr_and_ssim_agree_with_torchmetrics(height, width, noise):
    first, second = videos(1, height, width, noise=noise)
    planes = [video.movedim(-1, 1) for video in (first, second)]
    expected = float(structural_similarity_index_measure(*planes, data_range=1.0))
    assert ssim(first[0], second[0]) == pytest.approx(expected, abs=2e-5)
    result = compare(first, second)
    if noise:
        expected = float(peak_signal_noise_ratio(first, second, data_range=1.0))
        assert result.psnr_total == pytest.approx(expected, abs=1e-3)
    else:
        assert result.psnr == [100.0] and result.ssim_mean == pytest.approx(1, abs=1e-6)


def test_ssim_of_smooth_pictures_agrees_with_float64():
    """Where variances are tiny, float32 has the most to lose."""
    ramp = torch.linspace(0.9, 0.95, 40).expand(33, 40)
    first = torch.stack((ramp, ramp.flip(1), ramp), dim=-1)
    second = first + 0.002 * torch.sin(torch.arange(40.0))[:, None]
    a, b = (np.pad(picture.double(), ((5, 5), (5, 5), (0, 0)), "reflect") for picture in (first, second))
    window = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    window = np.outer(window, window) / window.sum() ** 2
    values = []
    for y in range(33):
        for x in range(40):
            for c in range(3):
                p, q = a[y : y + 11, x : x + 11, c], b[y : y + 11, x : x + 11, c]
                mp, mq = (window * p).sum(), (window * q).sum()
                vp, vq = (window * (p - mp) ** 2).sum(), (window * (q - mq) ** 2).sum()
                cov = (window * (p - mp) * (q - mq)).sum()
                numerator = (2 * mp * mq + 0.01**2) * (2 * cov + 0.03**2)
                values.append(numerator / ((mp**2 + mq**2 + 0.01**2) * (vp + vq + 0.03**2)))
    assert ssim(first, second) == pytest.approx(np.mean(values), abs=1e-4)


def test_flicker_is_the_change_of_the_difference():
    first, second = videos(4)
    result = compare(first, second)
    difference = (second.double() - first.double()).numpy()
    expected = 255 * np.abs(np.diff(difference, axis=0)).mean((1, 2, 3))
    assert result.flicker == pytest.approx(list(expected), rel=1e-5)
    assert result.flicker_mean == pytest.approx(expected.mean(), rel=1e-5)


def test_a_constant_shift_does_not_flicker_and_alternating_frames_do():
    still = torch.full((6, 16, 16, 3), 0.5)
    assert compare(still, still + 0.1).flicker == pytest.approx([0] * 5, abs=1e-4)
    blinking = still.clone()
    blinking[::2] += 0.1
    assert compare(still, blinking).flicker == pytest.approx([25.5] * 5, rel=1e-4)
    assert flicker(torch.zeros(2, 2, 3), torch.zeros(2, 2, 3)) == 0


def test_totals_weigh_pixels_not_decibels():
    still = torch.full((4, 16, 16, 3), 0.5)
    last_differs = still.clone()
    last_differs[3] += 0.1
    result = compare(still, last_differs)
    assert result.psnr == pytest.approx([100, 100, 100, 20], abs=1e-4)
    assert result.psnr_total == pytest.approx(-10 * math.log10(0.01 / 4), abs=1e-4)
    assert psnr(0.0) == psnr(1e-30) == 100


def test_the_common_beginning_is_compared_and_the_report_says_so():
    first, second = videos(5)
    result = compare(first, second[:3])
    assert result.psnr == compare(first[:3], second[:3]).psnr
    report = comparison_report(result, ("full", "packed"), "no weights")
    assert "lengths differ (5 and 3)" in report and "packed against full: 3 frames of 53 x 37" in report
    assert "LPIPS was not measured: no weights" in report
    record = json.loads(report.splitlines()[-1])
    assert record["frames"] == 3 and len(record["psnr_each"]) == 3 and len(record["flicker_each"]) == 2
    assert record["psnr"] == pytest.approx(result.psnr_total, abs=1e-3) and record["lpips"] is None


def test_frames_are_taken_as_they_would_be_saved():
    first, second = videos(2)
    opaque = torch.cat((second, torch.rand(2, 37, 53, 1)), dim=-1)
    assert compare(first, opaque).psnr == compare(first, second).psnr
    assert compare(first, torch.where(second >= 1, 7.0, second)).psnr == compare(first, second).psnr


def test_nothing_that_is_made_grows_with_the_video():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                self.elements = max(self.elements, made.numel())
            return made

    frame = torch.rand(1, 24, 24, 3)
    first, second = frame.expand(200, -1, -1, -1), (frame * 0.9).expand(200, -1, -1, -1)
    with Largest() as largest:
        assert len(compare(first, second).ssim) == 200
    assert largest.elements < 10 * frame.numel()


def test_one_frame_and_half_precision():
    first, second = videos(1)
    result = compare(first.half(), second.half(), lpips=lambda a, b: float((a - b).abs().max()))
    assert result.flicker == [] and result.flicker_mean == 0
    assert len(result.lpips) == 1 and "LPIPS 0." in comparison_report(result, ("a", "b"))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 37, 54, 3), r"one size; got 53 x 37 and 54 x 37\. Bring"),
        ((0, 37, 53, 3), r"at least one frame; got 2 and 0"),
    ],
)
def test_batches_that_cannot_be_compared(shape, message):
    with pytest.raises(ValueError, match=message):
        compare(videos(2)[0], torch.zeros(shape))


def test_pictures_too_small_or_broken_are_refused():
    with pytest.raises(ValueError, match="at least 11 x 11 pixels, the window of SSIM; got 10 x 40"):
        compare(torch.zeros(1, 40, 10, 3), torch.zeros(1, 40, 10, 3))
    first, second = videos(3)
    second[1, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="frame 2 holds values that are not numbers"):
        compare(first, second)

"""Two videos frame by frame: curves, totals and a report. Only two frames and two differences are held at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .picture_metrics import PSNR_CEILING, WINDOW, flicker, psnr, ssim

PictureScore = Callable[[torch.Tensor, torch.Tensor], float]
OnFrame = Callable[[int, torch.Tensor, torch.Tensor, float], None]


@dataclass
class Comparison:
    """What two videos have in common, a value for each frame.

    squared_error, ssim, lpips: of each pair of frames (lpips is empty where it was not measured).
    flicker: of each frame but the first against the one before, in 8-bit levels.
    lengths, size: frames of both videos, and width and height of a frame.
    """

    lengths: tuple[int, int]
    size: tuple[int, int]
    squared_error: list[float] = field(default_factory=list)
    ssim: list[float] = field(default_factory=list)
    flicker: list[float] = field(default_factory=list)
    lpips: list[float] = field(default_factory=list)

    @property
    def psnr(self) -> list[float]:
        """Decibels of each frame."""
        return [psnr(error) for error in self.squared_error]

    @property
    def psnr_total(self) -> float:
        """Decibels over the pixels of all frames, so that frames that are equal cannot hide those that are not."""
        return psnr(sum(self.squared_error) / len(self.squared_error))

    @property
    def ssim_mean(self) -> float:
        return sum(self.ssim) / len(self.ssim)

    @property
    def flicker_mean(self) -> float:
        """0 for a single frame."""
        return sum(self.flicker) / max(len(self.flicker), 1)

    @property
    def lpips_mean(self) -> float | None:
        return sum(self.lpips) / len(self.lpips) if self.lpips else None


def check_comparable(first: torch.Tensor, second: torch.Tensor) -> None:
    """Two batches of frames `[T, H, W, C]` must have frames of one size, large enough for SSIM's window.

    Raises:
        ValueError: otherwise, with both sizes.
    """
    (height, width), (other_height, other_width) = first.shape[1:3], second.shape[1:3]
    if (height, width) != (other_height, other_width):
        raise ValueError(
            f"both batches need frames of one size; got {width} x {height} and {other_width} x {other_height}. "
            "Bring one to the size of the other with Upscale Image."
        )
    if min(height, width) < WINDOW:
        raise ValueError(
            f"frames must be at least {WINDOW} x {WINDOW} pixels, the window of SSIM; got {width} x {height}. "
            "Enlarge both with Upscale Image."
        )
    if not len(first) or not len(second):
        raise ValueError(f"both batches need at least one frame; got {len(first)} and {len(second)}.")


def compare(
    first: torch.Tensor, second: torch.Tensor, lpips: PictureScore | None = None, on_frame: OnFrame | None = None
) -> Comparison:
    """Compare the common beginning of two batches of frames `[T, H, W, C]` in 0..1; colours only, clamped as saved.

    Args:
        lpips: gives the perceptual distance of two frames `[H, W, 3]`.
        on_frame: called with index, both frames `[H, W, 3]` and the frame's PSNR after each frame.

    Raises:
        ValueError: when sizes differ, or a frame holds NaN.
    """
    check_comparable(first, second)
    result = Comparison((len(first), len(second)), (first.shape[2], first.shape[1]))
    before = None
    for index in range(min(result.lengths)):
        a, b = _colors(first[index]), _colors(second[index]).to(first.device)
        difference = b - a
        error = float(difference.square().mean(dtype=torch.float32))
        if error != error:
            raise ValueError(
                f"frame {index + 1} holds values that are not numbers (NaN), so nothing can be measured. "
                "Look at the decoder before this node: with --fp32-vae it may give numbers."
            )
        result.squared_error.append(error)
        result.ssim.append(ssim(a, b))
        if before is not None:
            result.flicker.append(flicker(difference, before))
        if lpips is not None:
            result.lpips.append(lpips(a, b))
        before = difference
        if on_frame is not None:
            on_frame(index, a, b, psnr(error))
    return result


def comparison_report(result: Comparison, names: tuple[str, str], lpips_reason: str | None = None) -> str:
    """Lines for people, then everything as one line of JSON. `lpips_reason` says why LPIPS is missing."""
    frames = len(result.squared_error)
    curve = result.psnr
    worst = min(range(frames), key=curve.__getitem__)
    equal = sum(value >= PSNR_CEILING for value in curve)
    width, height = result.size
    lines = [
        f"PSNR {in_decibels(result.psnr_total)}, SSIM {result.ssim_mean:.4f}, flicker {result.flicker_mean:.2f} of 255"
        + (f", LPIPS {result.lpips_mean:.4f}" if result.lpips else ""),
        f"{names[1]} against {names[0]}: {frames} frames of {width} x {height}",
        f"worst is frame {worst + 1} with {in_decibels(curve[worst])}" + (f"; {equal} are equal" if equal else ""),
    ]
    if result.lengths[0] != result.lengths[1]:
        lines.append(f"lengths differ ({result.lengths[0]} and {result.lengths[1]}): the common beginning was compared")
    if lpips_reason:
        lines.append(f"LPIPS was not measured: {lpips_reason}")
    lines.append(json.dumps(_as_json(result)))
    return "\n".join(lines)


def in_decibels(value: float) -> str:
    return "equal" if value >= PSNR_CEILING else f"{value:.2f} dB"


def _as_json(result: Comparison) -> dict:
    return {
        "frames": len(result.squared_error),
        "psnr": round(result.psnr_total, 4),
        "ssim": round(result.ssim_mean, 6),
        "flicker": round(result.flicker_mean, 4),
        "lpips": None if result.lpips_mean is None else round(result.lpips_mean, 6),
        "psnr_each": [round(value, 3) for value in result.psnr],
        "ssim_each": [round(value, 5) for value in result.ssim],
        "flicker_each": [round(value, 3) for value in result.flicker],
        "lpips_each": [round(value, 5) for value in result.lpips],
    }


def _colors(frame: torch.Tensor) -> torch.Tensor:
    return frame[..., :3].float().clamp(0, 1)

"""What the tiny world's model is told about the camera: four numbers as four context tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .render import ORBIT_RANGE, TURN_RATE_RANGE, Motion, motion_of

CONTEXT_TOKENS = 4
CONTEXT_DIM = 64

_OCTAVES = 8
_PROFILE = 2 * _OCTAVES  # sine and cosine features of a number; the rest of a token names which number it is


def context_tokens(motion: Motion) -> Tensor:
    """Context [B, 4, 64] for B camera motions: turn rate, orbit radius, cosine and sine of the phase."""
    phase = torch.deg2rad(motion.phase)
    numbers = torch.stack(
        [torch.deg2rad(motion.turn_rate) * 4, motion.orbit * 3, torch.cos(phase), torch.sin(phase)], dim=-1
    )
    angles = numbers[..., None] * torch.arange(1, _OCTAVES + 1, device=numbers.device, dtype=numbers.dtype)
    names = torch.eye(CONTEXT_TOKENS, CONTEXT_DIM - _PROFILE, device=numbers.device, dtype=numbers.dtype)
    return torch.cat([torch.sin(angles), torch.cos(angles), names.expand(len(numbers), -1, -1)], dim=-1)


def conditioning(turn_rate: float, orbit: float, phase: float) -> Tensor:
    """Context [1, 4, 64] for one camera motion: degrees a frame, radius, degrees.

    Raises ValueError outside the range the model was trained on, where it would drift without saying so.
    """
    check_motion(turn_rate, orbit)
    return context_tokens(motion_of(turn_rate, orbit, phase))


def check_motion(turn_rate: float, orbit: float) -> None:
    """Raise ValueError unless the model was trained on such a motion."""
    slow, fast = TURN_RATE_RANGE
    if not slow <= abs(turn_rate) <= fast:
        raise ValueError(
            f"turn_rate must be between {slow:g} and {fast:g} degrees a frame in either direction, "
            f"got {turn_rate:g}. Set it to 18 for a full turn in 20 frames, or -18 to turn the other way."
        )
    low, high = ORBIT_RANGE
    if not low <= orbit <= high:
        raise ValueError(
            f"orbit must be between {low:g} and {high:g}, got {orbit:g}. Set it to 0 for a camera that only turns."
        )

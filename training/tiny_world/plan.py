"""How long and how large: the full training and the quick one that only walks through the code."""

from __future__ import annotations

import time
from dataclasses import dataclass

from . import ranks

STUDENT_TIMES = (1.0, 0.75, 0.5, 0.25)
SHIFT = 5.0


def sigma_of(t):
    """Noise level of a flow time in [0, 1] under the host's shift for causal Wan models; number or tensor."""
    return SHIFT * t / (1 + (SHIFT - 1) * t)


@dataclass(frozen=True)
class Plan:
    """Sizes and time budgets. Seconds are wall-clock; compilation counts in."""

    codec_seconds: float
    world_seconds: float
    distill_seconds: float
    slim_seconds: float
    clips: int = 6
    frames: int = 36
    copies: int = 4
    partitions: int = 48
    codec_batch: int = 48
    log_every: int = 250
    codec_width: int = 96
    codec_residuals: tuple[int, int, int] = (1, 2, 2)
    slim_width: int = 64
    slim_residuals: tuple[int, int, int] = (0, 1, 1)
    eval_worlds: int = 16
    eval_frames: int = 36
    long_seed: int = 21
    short_seed: int = 6

    @classmethod
    def full(cls, minutes: float) -> Plan:
        """Most of the time goes into the world model."""
        seconds = 60.0 * minutes
        return cls(
            codec_seconds=0.12 * seconds,
            slim_seconds=0.08 * seconds,
            world_seconds=0.58 * seconds,
            distill_seconds=0.22 * seconds,
        )

    @classmethod
    def resumed(cls, minutes: float) -> Plan:
        """The same for a run that starts from a codec and a world model."""
        seconds = 60.0 * minutes
        return cls(
            codec_seconds=0,
            slim_seconds=0.17 * seconds,
            world_seconds=0.78 * seconds,
            distill_seconds=0.22 * seconds,
        )

    @classmethod
    def quick(cls) -> Plan:
        """About a minute on two cores. The result is worthless; every line of code runs."""
        return cls(
            codec_seconds=4,
            slim_seconds=4,
            world_seconds=8,
            distill_seconds=10,
            clips=1,
            frames=6,
            partitions=4,
            codec_batch=4,
            log_every=1,
            codec_width=16,
            codec_residuals=(0, 1, 1),
            slim_width=16,
            slim_residuals=(0, 0, 1),
            eval_worlds=2,
            eval_frames=9,
            long_seed=6,
            short_seed=3,
        )


class Budget:
    """A wall-clock budget that starts when it is made."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.start = time.monotonic()
        self.progress = 0.0
        """Share of the budget that was spent when last asked, 0 to 1 and beyond."""

    def spent(self) -> bool:
        """Look at the clock, process 0's if there are several: each must ask once a step."""
        self.progress = ranks.agree((time.monotonic() - self.start) / max(1e-9, self.seconds))
        return self.progress >= 1

    def learning_rate(self, peak: float, step: int, warmup: int, hold: float) -> float:
        """Linear warm-up in steps, constant until `hold` of the budget, then linear to 2 % of the peak."""
        decay = 1.0 if self.progress < hold else (1 - self.progress) / (1 - hold)
        return peak * min(1.0, (step + 1) / warmup) * max(0.02, decay)

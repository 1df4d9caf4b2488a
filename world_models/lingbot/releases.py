"""The published models and how each is sampled, and the sizes that their code would choose.

Facts: the commands in the public repositories of LingBot-World and its second version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .camera import FRAMES_PER_LATENT, LATENT_PIXELS
from .schedule import few_step_sigmas, path_sigmas

PATCH = 2


@dataclass(frozen=True)
class Release:
    """Latent frames a block, the noise levels of a run by index, and the window in latent frames (0 for none).

    steps: of a model that is not distilled, in place of indices: it follows one path, with guidance.
    """

    block: int
    indices: tuple[int, ...] = ()
    window: int = 0
    sink: int = 0
    steps: int = 0

    def sigmas(self) -> list[float]:
        return path_sigmas(self.steps) if self.steps else few_step_sigmas(self.indices)

    @property
    def solver(self) -> str:
        """How World Sampler gets from one noise level to the next."""
        return "unipc" if self.steps else "few-step"

    def usable_frames(self, frames: int) -> int:
        """Video frames 4 n + 1 that a path of `frames` fills."""
        return FRAMES_PER_LATENT * ((frames - 1) // FRAMES_PER_LATENT) + 1

    def latents(self, frames: int) -> int:
        """Latent frames of a video of `frames`, cut to whole blocks.

        Raises:
            ValueError: when they do not fill one block.
        """
        held = (frames - 1) // FRAMES_PER_LATENT + 1
        latents = held - held % self.block
        if not latents:
            least = FRAMES_PER_LATENT * (self.block - 1) + 1
            raise ValueError(
                f"the camera path must be at least {least} frames long, to fill a block of {self.block} latent frames; "
                f"got {frames}. Raise length in Camera Path."
            )
        return latents


RELEASES = {
    "v2 causal-fast": Release(block=4, indices=(0, 250, 500, 750), window=18, sink=6),
    "v1 fast": Release(block=3, indices=(0, 179, 358, 679)),
    "v2 causal-pretrain": Release(block=4, steps=40),
}


def size_for(width: int, height: int, area: int) -> tuple[int, int]:
    """The video size (width, height) of a picture's aspect within `area` pixels, cut to what latents can have."""
    aspect, step = height / width, LATENT_PIXELS * PATCH
    sides = (math.sqrt(area / aspect), math.sqrt(area * aspect))
    # A side that fits exactly must not lose a step to rounding.
    return tuple(max(step, int((side + 1e-6) // step) * step) for side in sides)

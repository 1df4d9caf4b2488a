"""Which blocks of a video a rollout can look back at: the first ones for ever, the newest ones, nothing between."""

from __future__ import annotations

from dataclasses import dataclass

from .settings import _require_choice, _require_range

MAX_FRAMES_PER_BLOCK = 64
SOLVERS = ("automatic", "few-step", "unipc")
MAX_FRAMES = 1 << 16


@dataclass(frozen=True)
class RolloutSettings:
    """How a video is made block by block. Lengths are latent frames.

    window: newest frames that stay in reach, 0 for all; sink: first frames that stay for ever beside them;
    context_noise: noise level, 0 to 1, at which a finished block is shown to the model to be remembered;
    solver: how a block gets from one noise level to the next: `few-step` by new noise on the finished picture,
    `unipc` along one path, `automatic` as the conditioning says (few-step where it says nothing).

    Raises:
        ValueError: for a value out of its domain; the message names the rule, the value and the remedy.
    """

    frames_per_block: int = 1
    window: int = 0
    sink: int = 0
    context_noise: float = 0.0
    solver: str = "automatic"

    def __post_init__(self) -> None:
        _require_choice("solver", self.solver, SOLVERS)
        _require_range("frames_per_block", self.frames_per_block, 1, MAX_FRAMES_PER_BLOCK, "a model is trained for few")
        _require_range("window", self.window, 0, MAX_FRAMES, "it counts latent frames")
        _require_range("sink", self.sink, 0, MAX_FRAMES, "it counts latent frames")
        if 0 < self.window < self.frames_per_block:
            raise ValueError(
                f"window must be 0 (everything) or at least frames_per_block, {self.frames_per_block}, because whole "
                f"blocks are remembered; got {self.window}. Raise window."
            )
        if not 0 <= self.context_noise < 1:
            raise ValueError(
                f"context_noise must be at least 0 and below 1 (at 1 nothing of a block is left); got "
                f"{self.context_noise!r}. Most models want 0."
            )

    def block_lengths(self, frames: int) -> list[int]:
        """Frames of each block when `frames` frames are cut into blocks, the last one perhaps shorter."""
        return [min(self.frames_per_block, frames - start) for start in range(0, frames, self.frames_per_block)]

    def room(self, frames: int, given: int = 0, recalled_blocks: int = 0) -> int:
        """Most frames that history and the current block ever hold together, for a video of `frames` frames."""
        if not self.window:
            return frames
        # The sink ends with a whole block.
        sink = self.sink + self.frames_per_block - 1 if self.sink else 0
        return min(frames, max(given, sink + self.window + (1 + recalled_blocks) * self.frames_per_block))


@dataclass(frozen=True)
class Block:
    """A finished block: its number and its frames, both counted from the start of the video."""

    number: int
    first_frame: int
    frames: int


class Window:
    """The blocks in reach. Whole blocks only: one is part of the sink when any of its frames is."""

    def __init__(self, settings: RolloutSettings) -> None:
        self.settings = settings
        self.blocks: list[Block] = []
        self._count = 0
        self._frames = 0

    @property
    def frames(self) -> int:
        """Frames in reach."""
        return sum(block.frames for block in self.blocks)

    def add(self, frames: int) -> Block:
        """Note a finished block that follows all earlier ones."""
        block = Block(self._count, self._frames, frames)
        self.blocks.append(block)
        self._count += 1
        self._frames += frames
        return block

    def take_leaving(self) -> list[Block]:
        """The blocks that no longer fit, oldest first; from now on they are out of reach."""
        s = self.settings
        if not s.window:
            return []
        room, leaving = s.window, []
        for block in reversed([block for block in self.blocks if block.first_frame >= s.sink]):
            room -= block.frames
            if room < 0:
                leaving.insert(0, block)
        self.blocks = [block for block in self.blocks if block not in leaving]
        return leaving

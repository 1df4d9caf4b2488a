"""Memory beyond the window, after WorldKV (arXiv 2605.22718): a bank of older blocks that come back when they fit.

Retrieval: blocks that leave the window go into a bank, as they are stored; before a block is made, those whose camera
looked most like its own return. Compression: of each block the first frame is kept whole, and of the others only the
tokens that it does not already show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .settings import CACHE_DEVICES, _require_choice, _require_range

RETRIEVALS = ("camera", "similarity", "off")


@dataclass(frozen=True)
class MemorySettings:
    """What happens to blocks beyond the window.

    retrieval: `camera` by pose, `similarity` by the means of queries and keys, or `off`;
    blocks: how many return for each new block; bank_blocks: how many the bank holds, 0 for all;
    keep: share of the tokens after a block's first frame that are stored at all.

    Raises:
        ValueError: for a value out of its domain; the message names the rule, the value and the remedy.
    """

    retrieval: str = "camera"
    blocks: int = 6
    bank_device: str = "cpu"
    bank_blocks: int = 0
    keep: float = 1.0

    def __post_init__(self) -> None:
        _require_choice("retrieval", self.retrieval, RETRIEVALS)
        _require_choice("bank_device", self.bank_device, CACHE_DEVICES)
        _require_range("blocks", self.blocks, 1, 1 << 12, "it counts blocks that return")
        _require_range("bank_blocks", self.bank_blocks, 0, 1 << 20, "it counts blocks")
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep must be above 0 and at most 1 (a share of tokens); got {self.keep!r}. Change keep.")

    @property
    def retrieves(self) -> bool:
        return self.retrieval != "off"

    @property
    def returning(self) -> int:
        """Most blocks that are back in reach at a time."""
        return self.blocks if self.retrieves else 0


@dataclass(frozen=True)
class Pose:
    """A camera: position `[3]` and rotation `[3, 3]`, float64."""

    position: torch.Tensor
    rotation: torch.Tensor


@dataclass(frozen=True)
class CameraMotion:
    """A camera that turns by `turn_rate` degrees a frame while it walks a circle of radius `orbit` from `phase` on.

    A CONDITIONING carries it under the key `camera_motion`.
    """

    turn_rate: float
    orbit: float = 0.0
    phase: float = 0.0


class CameraPath:
    """Poses frame by frame, integrated from motions that may change on the way."""

    def __init__(self) -> None:
        self._turned = [0.0]
        self._motions: list[CameraMotion] = []

    def extend(self, motion: CameraMotion, frames: int) -> None:
        """Go on for some frames."""
        for _ in range(frames):
            self._motions.append(motion)
            self._turned.append(self._turned[-1] + motion.turn_rate)

    def pose(self, frame: int) -> Pose:
        """Pose in a frame that has been reached, relative to the first heading."""
        motion, turned = self._motions[frame], math.radians(self._turned[frame])
        angle = math.radians(motion.phase) + turned
        position = torch.tensor([math.cos(angle), math.sin(angle), 0.0], dtype=torch.float64) * motion.orbit
        cos, sin = math.cos(turned), math.sin(turned)
        rotation = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
        return Pose(position, rotation)


class PosePath:
    """A path that is known in advance: poses float64 `[T, 4, 4]`, the last of which goes on for ever."""

    def __init__(self, poses: torch.Tensor) -> None:
        self._poses = poses

    def pose(self, frame: int) -> Pose:
        """Pose in a frame."""
        pose = self._poses[min(frame, len(self._poses) - 1)]
        return Pose(pose[:3, 3], pose[:3, :3])


def pose_distances(pose: Pose, others: Sequence[Pose]) -> torch.Tensor:
    """WorldKV's score of each of `others` against `pose`, float64 `[N]`, smaller is nearer.

    0.5 |t - t_j|^2 / max + 0.5 arccos((tr(R_j^T R) - 1) / 2) / max, each maximum over the candidates.
    """
    positions = torch.stack([other.position for other in others])
    rotations = torch.stack([other.rotation for other in others])
    shift = (positions - pose.position).square().sum(-1)
    trace = torch.einsum("nij,ij->n", rotations, pose.rotation)
    turn = torch.arccos(((trace - 1) / 2).clamp(-1, 1))
    return sum(0.5 * term / term.max().clamp_min(1e-12) for term in (shift, turn))


class Bank:
    """Which blocks are in the bank, with their poses; the tensors are with the layers."""

    def __init__(self, settings: MemorySettings) -> None:
        self.settings = settings
        self.poses: dict[int, Pose | None] = {}

    def add(self, number: int, pose: Pose | None) -> None:
        """Note a block that has left the window."""
        self.poses[number] = pose

    def nearest(self, pose: Pose) -> list[int]:
        """The blocks to bring back for a block at `pose`; of equally near ones the newest.

        Models know distances in time only as far as they were trained for, so a view from the last turn serves better
        than the same view from the first one.
        """
        if not self.poses:
            return []
        numbers = list(self.poses)
        # Rounding must not decide between views that are the same.
        distances = (pose_distances(pose, list(self.poses.values())) * 1e6).round().tolist()
        ranked = sorted(zip(distances, (-number for number in numbers)))
        return sorted(-number for _, number in ranked[: self.settings.blocks])

    def take_surplus(self) -> list[int]:
        """Blocks that the bank has no room for: by pose those that show what a newer one shows, else the oldest."""
        surplus = []
        while 0 < self.settings.bank_blocks < len(self.poses):
            surplus.append(self._most_redundant())
            del self.poses[surplus[-1]]
        return surplus

    def _most_redundant(self) -> int:
        numbers = list(self.poses)
        if any(pose is None for pose in self.poses.values()):
            return numbers[0]
        nearest = {}
        for index, number in enumerate(numbers[:-1]):
            newer = [self.poses[each] for each in numbers[index + 1 :]]
            nearest[number] = _closeness(self.poses[number], newer)
        return min(nearest, key=lambda number: (round(nearest[number], 6), number))


def _closeness(pose: Pose, others: list[Pose]) -> float:
    """Distance to the nearest of `others`: length moved plus angle turned, so that no maximum depends on the others."""
    positions = torch.stack([other.position for other in others])
    trace = torch.einsum("nij,ij->n", torch.stack([other.rotation for other in others]), pose.rotation)
    turn = torch.arccos(((trace - 1) / 2).clamp(-1, 1))
    return float(((positions - pose.position).norm(dim=-1) + turn).min())


def kept_tokens(keys: torch.Tensor, frame_tokens: int, keep: float) -> torch.Tensor | None:
    """Which tokens of a block `[B, S, H, D]` to store: indices `[B, n]` in order, or None for all.

    The first frame is the anchor. Its mean key, heads side by side, is the reference; of the other frames the tokens
    least similar to it by cosine are kept, `keep` of them.
    """
    others = keys.shape[1] - frame_tokens
    count = round(keep * others)
    if others <= 0 or count == others:
        return None
    rows = keys.flatten(2).float()
    reference = rows[:, :frame_tokens].mean(1, keepdim=True)
    similarity = torch.cosine_similarity(rows[:, frame_tokens:], reference, dim=-1)
    chosen = similarity.topk(count, dim=1, largest=False).indices.sort(dim=1).values + frame_tokens
    anchor = torch.arange(frame_tokens, device=keys.device).expand(keys.shape[0], -1)
    return torch.cat((anchor, chosen), dim=1)


def take_tokens(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Some tokens of `x` `[B, S, H, D]` by their indices `[B, n]`."""
    return x.gather(1, tokens[:, :, None, None].expand(-1, -1, *x.shape[2:]))

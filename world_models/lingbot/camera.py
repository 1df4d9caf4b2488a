"""Camera paths: what LingBot-World is told about where each latent frame looks.

Conventions (OpenCV): a pose is a 4 x 4 camera-to-world matrix; x points right, y down, z into the picture. Intrinsics
are (fx, fy, cx, cy) in pixels of an 832 x 480 picture, whatever the size of the video. One pose a video frame.

The model does not see absolute poses: each latent frame carries the camera's motion since the latent frame before, in
that frame's coordinates, and all translations are divided by the longest of the clip, so only their proportions count.
Facts: the public code of LingBot-World (Robbyant/lingbot-world), and Quant-VideoGen's copy of its second version.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.spatial.transform import Rotation, Slerp

REFERENCE_WIDTH, REFERENCE_HEIGHT = 832, 480
LATENT_PIXELS = 8
FRAMES_PER_LATENT = 4
RAY_CHANNELS = 6
# Of the act variants: directions of rays, and whether each of these keys is pressed.
ACT_CHANNELS = 7
WALKING_KEYS = "wasd"
ROTATION_TOLERANCE = 1e-2


@dataclass(frozen=True, eq=False)
class CameraPath:
    """Poses float64 `[F, 4, 4]`, one a video frame, and intrinsics (fx, fy, cx, cy) at 832 x 480.

    keys: `[F, 4]`, 1 where w, a, s, d are pressed, for the act variants; None where nobody walks by keys.
    """

    poses: np.ndarray
    intrinsics: tuple[float, float, float, float]
    keys: np.ndarray | None = None

    def __post_init__(self) -> None:
        check_poses(self.poses)
        check_intrinsics(self.intrinsics)
        if self.keys is not None:
            check_keys(self.keys, len(self.poses))

    def __len__(self) -> int:
        return len(self.poses)

    @property
    def fov(self) -> float:
        """Horizontal angle of view in degrees."""
        return float(np.degrees(2 * np.arctan(REFERENCE_WIDTH / 2 / self.intrinsics[0])))


@dataclass(frozen=True, eq=False)
class LatentCamera:
    """What a run carries: relative poses float32 `[T, 4, 4]`, one a latent frame, intrinsics at 832 x 480, and keys."""

    poses: torch.Tensor
    intrinsics: tuple[float, float, float, float]
    keys: torch.Tensor | None = None

    def rays(self, frames: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Rays `[n, 6, height, width]` of some latent frames, by index `[n]`, for a video of that many pixels.

        Channels are the origin (the same for all pixels of a frame) and the unit direction of each pixel's ray.
        """
        turned = self._directions(frames, height, width)
        origins = self.poses.to(frames.device)[frames][:, :3, 3, None, None].expand_as(turned)
        return torch.cat((origins, turned), dim=1)

    def act_rays(self, frames: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """As `rays`, for the act variants: `[n, 7, height, width]`, the direction of each ray, and the keys pressed.

        Poses only turn the camera there; the keys move it.
        """
        if self.keys is None:
            raise ValueError(
                "this checkpoint is an act variant, which is told the keys w a s d beside the camera; this path has "
                "none. Set motion in Camera Path to actions, or put action.npy [frames, 4] beside poses.npy."
            )
        turned = self._directions(frames, height, width)
        pressed = self.keys.to(turned)[frames.to(self.keys.device)]
        return torch.cat((turned, pressed[:, :, None, None].expand(-1, -1, height, width)), dim=1)

    def _directions(self, frames: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Unit directions of the pixels' rays `[n, 3, height, width]`."""
        poses = self.poses.to(frames.device)[frames]
        directions = _pixel_directions(self.intrinsics, height, width, frames.device)
        return torch.einsum("nij,hwj->nihw", poses[:, :3, :3], directions)

    def chained(self) -> torch.Tensor:
        """Where each latent frame stands and looks, from the first one: float64 `[T, 4, 4]`."""
        chained = self.poses.double().cpu().clone()
        for frame in range(1, len(chained)):
            chained[frame] = chained[frame - 1] @ chained[frame]
        return chained


def latent_camera(path: CameraPath, frames: int, latents: int) -> LatentCamera:
    """The first `frames` poses of a path, spread evenly over `latents` latent frames, each relative to the one before.

    When the latent frames were cut to whole blocks, `frames` is still the count before: the path is stretched, not cut.
    """
    poses, keys = resample(path.poses[:frames], latents), None
    if path.keys is not None:
        # Every fourth row; where the path is stretched, the nearest one.
        nearest = np.linspace(0, frames - 1, latents).round().astype(int)
        keys = torch.from_numpy(path.keys[nearest]).float()
    # Steps are small beside coordinates: they are told apart in float64.
    return LatentCamera(relative_poses(torch.from_numpy(poses)).float(), path.intrinsics, keys)


def resample(poses: np.ndarray, count: int) -> np.ndarray:
    """`count` poses evenly spaced along a path, first and last kept: translations linear, rotations spherical."""
    if len(poses) == 1 or count == 1:
        return poses[[0] * count].copy()
    known, wanted = np.arange(len(poses)), np.linspace(0, len(poses) - 1, count)
    out = np.tile(np.eye(4), (count, 1, 1))
    out[:, :3, :3] = Slerp(known, Rotation.from_matrix(poses[:, :3, :3]))(wanted).as_matrix()
    for axis in range(3):
        out[:, axis, 3] = np.interp(wanted, known, poses[:, axis, 3])
    return out


def relative_poses(poses: torch.Tensor) -> torch.Tensor:
    """Poses `[T, 4, 4]`, each in the coordinates of the one before; the first is the identity.

    Translations are divided by the longest of them, unless nothing moves.
    """
    to_first = _inverse(poses[:1]) @ poses
    to_first[0] = torch.eye(4, dtype=poses.dtype)
    relative = to_first.clone()
    relative[1:] = _inverse(to_first[:-1]) @ to_first[1:]
    longest = relative[:, :3, 3].norm(dim=-1).max()
    if longest > 0:
        relative[:, :3, 3] /= longest
    return relative


def unshuffled(rays: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """Rays `[n, C, H, W]` in pixels -> `[n * tokens, C * 8 * 8 * patch]`, as the camera embedding reads them.

    A latent position holds its 8 x 8 pixels channel by channel, and a token holds its latent positions last.
    """
    frames, channels, height, width = rays.shape
    _, ph, pw = patch
    rows, columns = height // (LATENT_PIXELS * ph), width // (LATENT_PIXELS * pw)
    split = rays.view(frames, channels, rows, ph, LATENT_PIXELS, columns, pw, LATENT_PIXELS)
    # [frame, row, column, channel, y in latent, x in latent, latent row, latent column]
    return split.permute(0, 2, 5, 1, 4, 7, 3, 6).reshape(frames * rows * columns, -1)


def intrinsics_for_fov(degrees: float) -> tuple[float, float, float, float]:
    """Square pixels and a centred axis, `degrees` wide."""
    focal = REFERENCE_WIDTH / 2 / np.tan(np.radians(degrees) / 2)
    return float(focal), float(focal), REFERENCE_WIDTH / 2, REFERENCE_HEIGHT / 2


def check_poses(poses: np.ndarray) -> None:
    """Raise ValueError unless these are camera-to-world matrices `[F, 4, 4]`."""
    if poses.ndim != 3 or poses.shape[1:] != (4, 4) or not len(poses):
        raise ValueError(
            f"poses must be camera-to-world matrices of shape [frames, 4, 4]; got {list(poses.shape)}. "
            "Save one 4 x 4 matrix a video frame."
        )
    if not np.isfinite(poses).all():
        bad = int(np.flatnonzero(~np.isfinite(poses).all(axis=(1, 2)))[0])
        raise ValueError(f"poses must be finite numbers; the pose of frame {bad} is not. Remove or repair it.")
    rotations = poses[:, :3, :3]
    off = np.abs(rotations @ rotations.transpose(0, 2, 1) - np.eye(3)).max(axis=(1, 2))
    off = np.maximum(off, np.abs(np.linalg.det(rotations) - 1))
    off = np.maximum(off, np.abs(poses[:, 3] - (0, 0, 0, 1)).max(axis=1))
    if off.max() > ROTATION_TOLERANCE:
        bad = int(off.argmax())
        raise ValueError(
            f"a pose must be a rotation and a translation; that of frame {bad} is off by {off[bad]:.3g} (allowed "
            f"{ROTATION_TOLERANCE}). Use camera-to-world matrices in OpenCV's axes (x right, y down, z forward), "
            "without scale or mirroring."
        )


def check_intrinsics(values: tuple[float, ...]) -> None:
    """Raise ValueError unless these are (fx, fy, cx, cy) of some camera."""
    if len(values) != 4 or not np.isfinite(values).all() or values[0] <= 0 or values[1] <= 0:
        raise ValueError(
            f"intrinsics must be four numbers fx, fy, cx, cy with positive focal lengths; got {list(values)}. "
            "Give them in pixels of an 832 x 480 picture."
        )
    if not (0 <= values[2] <= REFERENCE_WIDTH and 0 <= values[3] <= REFERENCE_HEIGHT):
        raise ValueError(
            f"the camera's axis must meet the picture; got cx, cy = {values[2]:g}, {values[3]:g}. Intrinsics are in "
            "pixels of an 832 x 480 picture, whatever the size of the video: scale those of another size."
        )


def check_keys(keys: np.ndarray, frames: int) -> None:
    """Raise ValueError unless these say for every frame which of w, a, s, d are pressed."""
    if keys.shape != (frames, len(WALKING_KEYS)):
        raise ValueError(
            f"keys must be a row of four (w, a, s, d) for each of {frames} frames; got shape {list(keys.shape)}. Save "
            "action.npy with shape [frames, 4]."
        )
    if not np.isin(keys, (0, 1)).all():
        raise ValueError("keys must be 0 or 1, for released or pressed. Save action.npy with these numbers only.")


def _pixel_directions(intrinsics, height: int, width: int, device: torch.device) -> torch.Tensor:
    """Unit directions float32 `[height, width, 3]` through pixel centres, in camera coordinates."""
    scale_x, scale_y = width / REFERENCE_WIDTH, height / REFERENCE_HEIGHT
    fx, fy, cx, cy = (v * s for v, s in zip(intrinsics, (scale_x, scale_y, scale_x, scale_y)))
    y, x = torch.meshgrid(
        torch.arange(height, device=device, dtype=torch.float32) + 0.5,
        torch.arange(width, device=device, dtype=torch.float32) + 0.5,
        indexing="ij",
    )
    directions = torch.stack(((x - cx) / fx, (y - cy) / fy, torch.ones_like(x)), dim=-1)
    return directions / directions.norm(dim=-1, keepdim=True)


def _inverse(poses: torch.Tensor) -> torch.Tensor:
    """Inverse of rigid motions `[N, 4, 4]`."""
    inverse = torch.eye(4, dtype=poses.dtype).repeat(len(poses), 1, 1)
    turned = poses[:, :3, :3].transpose(1, 2)
    inverse[:, :3, :3] = turned
    inverse[:, :3, 3:] = -turned @ poses[:, :3, 3:]
    return inverse

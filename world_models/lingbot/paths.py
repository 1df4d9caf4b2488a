"""Ways to describe a camera path. Each gives camera-to-world matrices float64 `[frames, 4, 4]`, as in `camera`.

All but files begin at the origin, looking along z, with the horizon level. Angles are degrees: yaw to the right, pitch
up, roll clockwise.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from scipy.spatial.transform import Rotation, Slerp

from .camera import WALKING_KEYS, CameraPath, check_poses, intrinsics_for_fov

# What a key does in one frame, as in the public code of LingBot-World v1 (its tool from key presses to poses).
STEP = 0.05
TURN = 2.0
STEEPEST = 85.0
KEYS = "wasdijkl"

SEGMENT = re.compile(
    r"(?P<keys>none|[a-z]*)(?:\[(?P<yaw>[-+.\d]+)/(?P<pitch>[-+.\d]+)\])?-(?P<frames>\d+)", re.IGNORECASE
)
FILES = POSES_FILE, INTRINSICS_FILE, KEYS_FILE = "poses.npy", "intrinsics.npy", "action.npy"


def orbit(frames: int, distance: float, angle: float) -> np.ndarray:
    """Around a point `distance` ahead, which stays in the middle of the picture; to the right for positive angles."""
    yaw = -np.linspace(0, angle, frames)
    return _poses((0, 0, distance) - distance * _forward(yaw), yaw)


def dolly(frames: int, distance: float, angle: float = 0) -> np.ndarray:
    """Straight ahead, or back for a negative distance."""
    return _poses(np.linspace(0, distance, frames)[:, None] * (0, 0, 1), np.zeros(frames))


def pan(frames: int, distance: float = 0, angle: float = 0) -> np.ndarray:
    """Turning on the spot."""
    return _poses(np.zeros((frames, 3)), np.linspace(0, angle, frames))


def walk(frames: int, distance: float, angle: float) -> np.ndarray:
    """Ahead along an arc, turning by `angle` on the way."""
    yaw = np.linspace(0, angle, frames)
    steps = _forward((yaw[1:] + yaw[:-1]) / 2) * distance / max(1, frames - 1)
    return _poses(np.concatenate((np.zeros((1, 3)), np.cumsum(steps, axis=0))), yaw)


PRESETS = {"orbit": orbit, "dolly": dolly, "pan": pan, "walk": walk}


def from_actions(text: str, frames: int) -> np.ndarray:
    """A walk by keyboard and mouse: comma-separated `keys-frames`, such as `w-20, wl-10, none-5, w[1.5/0]-8`.

    w a s d move by 0.05, i k look up and down, j l left and right by 2 degrees; `none` waits. `[yaw/pitch]` is the
    mouse: degrees a frame, right and up. The first frame is the start, each later one what a key did. The camera waits
    when the text ends before the video.

    Raises:
        ValueError: naming the part of the text that cannot be read.
    """
    pose, pitch, made = np.eye(4), 0.0, [np.eye(4)]
    moves = [move for part in _parts(text) for move in _moves(part)]
    for keys, yaw, rise in moves[: frames - 1]:
        rise = rise if abs(pitch + rise) <= STEEPEST else 0.0
        pitch += rise
        # Yaw turns about the world's vertical, pitch about the camera's own side.
        turned = _rotation(yaw) @ pose[:3, :3] @ _rotation(pitch=rise)
        ahead, right = (_level(turned[:, axis]) for axis in (2, 0))
        step = ahead * (("w" in keys) - ("s" in keys)) + right * (("d" in keys) - ("a" in keys))
        pose = np.block([[turned, (pose[:3, 3] + STEP * step)[:, None]], [np.zeros((1, 3)), np.ones((1, 1))]])
        made.append(pose)
    return np.stack(made + made[-1:] * (frames - len(made)))


def pressed_keys(text: str, frames: int) -> np.ndarray:
    """The keys w a s d of the same text, frame by frame: `[frames, 4]`, 1 where pressed, for the act variants."""
    moves = [move for part in _parts(text) for move in _moves(part)][:frames]
    pressed = np.zeros((frames, len(WALKING_KEYS)))
    for frame, (keys, _, _) in enumerate(moves):
        pressed[frame] = [key in keys for key in WALKING_KEYS]
    return pressed


def from_keyframes(text: str, frames: int) -> np.ndarray:
    """Poses between given ones: one line each, `frame x y z yaw pitch roll`; the last three may be left out.

    Raises:
        ValueError: naming the line that cannot be read.
    """
    rows = [_keyframe(line) for line in text.splitlines() if line.strip()]
    if not rows:
        raise ValueError("keyframes is empty; give one line a keyframe: frame x y z yaw pitch roll, such as 0 0 0 0 0.")
    times = [row[0] for row in rows]
    if sorted(set(times)) != times:
        raise ValueError(f"the frames of keyframes must rise from line to line; got {[int(t) for t in times]}.")
    keys = np.array(rows)
    wanted = np.clip(np.arange(frames), times[0], times[-1])
    position = np.stack([np.interp(wanted, times, keys[:, axis]) for axis in (1, 2, 3)], axis=1)
    rotations = Rotation.from_matrix(_rotation(*keys[:, 4:].T))
    out = np.tile(np.eye(4), (frames, 1, 1))
    out[:, :3, :3] = Slerp(times, rotations)(wanted).as_matrix() if len(rows) > 1 else rotations.as_matrix()
    out[:, :3, 3] = position
    return out


def from_files(folder: Path, frames: int, fov: float) -> CameraPath:
    """The path in a folder of LingBot-World's format: `poses.npy` `[F, 4, 4]`, and if they are there `intrinsics.npy`
    `[F, 4]` and `action.npy` `[F, 4]`, the keys w a s d.

    Only the first row of the intrinsics counts, as in the public code.

    Raises:
        ValueError: when a file is missing, is no such array, or holds fewer than `frames` poses.
    """
    if not (folder / POSES_FILE).is_file():
        raise ValueError(
            f"no {POSES_FILE} in {folder.name!r}. Put a folder with {POSES_FILE} (and {INTRINSICS_FILE}) into "
            "ComfyUI's input folder, and give its name."
        )
    poses = _array(folder / POSES_FILE)
    check_poses(poses)
    if len(poses) < frames:
        raise ValueError(
            f"{POSES_FILE} in {folder.name!r} has {len(poses)} poses, one a frame, but length is {frames}. "
            f"Set length to {len(poses)} or less."
        )
    intrinsics = intrinsics_for_fov(fov)
    if (folder / INTRINSICS_FILE).is_file():
        rows = np.atleast_2d(_array(folder / INTRINSICS_FILE))
        if rows.ndim != 2 or rows.shape[1] != 4 or not len(rows):
            raise ValueError(
                f"{INTRINSICS_FILE} in {folder.name!r} must hold fx, fy, cx, cy a frame, shape [frames, 4]; "
                f"got {list(rows.shape)}."
            )
        intrinsics = tuple(map(float, rows[0]))
    keys = _array(folder / KEYS_FILE) if (folder / KEYS_FILE).is_file() else None
    return CameraPath(poses[:frames], intrinsics, None if keys is None else keys[:frames])


def _array(file: Path) -> np.ndarray:
    try:
        array = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        # NumPy's own words would advise to run what a pickle holds.
        raise ValueError(f"{file.name} is no plain NumPy array, or not all of it. Save it with numpy.save.") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iuf":
        raise ValueError(f"{file.name} must be an array of real numbers. Save it with numpy.save.")
    return array.astype(np.float64)


def _parts(text: str) -> list[str]:
    parts = ["".join(part.split()) for part in text.strip().strip(",").split(",")]
    if not any(parts):
        raise ValueError("actions is empty; give keys and frames, such as w-20, wl-10, none-5.")
    return parts


def _moves(part: str) -> list[tuple[str, float, float]]:
    """(keys, yaw, pitch) of each frame of one part."""
    read = SEGMENT.fullmatch(part)
    keys = read["keys"].lower().replace("none", "") if read else ""
    wrong = "".join(sorted(set(keys) - set(KEYS)))
    if read is None or wrong or not int(read["frames"]):
        why = f"{wrong!r} is no key; keys are {', '.join(KEYS)}" if wrong else "it is not keys-frames"
        raise ValueError(f"actions: cannot read {part!r}: {why}. Write for example w-20, wl-10, none-5, w[1.5/0]-8.")
    try:
        yaw, pitch = (float(read[name] or 0) for name in ("yaw", "pitch"))
    except ValueError as error:
        raise ValueError(
            f"actions: the mouse in {part!r} is not two numbers; write for example w[1.5/-0.5]-8."
        ) from error
    yaw += TURN * (("l" in keys) - ("j" in keys))
    pitch += TURN * (("i" in keys) - ("k" in keys))
    return [(keys, yaw, pitch)] * int(read["frames"])


def _keyframe(line: str) -> list[float]:
    words = line.replace(",", " ").replace(":", " ").split()
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if not 4 <= len(numbers) <= 7 or not np.isfinite(numbers).all() or numbers[0] < 0 or numbers[0] % 1:
        raise ValueError(
            f"keyframes: cannot read {line.strip()!r}. Each line is frame x y z yaw pitch roll: a whole frame from 0, "
            "a position (right, down, ahead), and degrees (right, up, clockwise), of which the last may be left out."
        )
    return numbers + [0.0] * (7 - len(numbers))


def _forward(yaw: np.ndarray) -> np.ndarray:
    """Horizontal directions `[n, 3]` for yaws in degrees."""
    angle = np.radians(yaw)
    return np.stack((np.sin(angle), np.zeros_like(angle), np.cos(angle)), axis=-1)


def _rotation(yaw=0.0, pitch=0.0, roll=0.0) -> np.ndarray:
    """Camera-to-world rotation(s) for degrees to the right, up and clockwise."""
    angles = np.stack(np.broadcast_arrays(yaw, pitch, roll), axis=-1)
    return Rotation.from_euler("YXZ", angles, degrees=True).as_matrix()


def _poses(positions: np.ndarray, yaw: np.ndarray) -> np.ndarray:
    out = np.tile(np.eye(4), (len(yaw), 1, 1))
    out[:, :3, :3] = _rotation(yaw)
    out[:, :3, 3] = positions
    return out


def _level(direction: np.ndarray) -> np.ndarray:
    """The horizontal part of a direction, at length 1."""
    flat = direction * (1, 0, 1)
    return flat / (np.linalg.norm(flat) + 1e-6)

"""Camera Path: where the camera goes, frame by frame, and a picture of it."""

from __future__ import annotations

from pathlib import Path

import folder_paths
from comfy_api.latest import io

from ..world_models.lingbot import CameraPath, paths
from ..world_models.lingbot.camera import intrinsics_for_fov
from .charts import chart_tensor
from .path_picture import path_picture
from .sockets import CATEGORY, CameraSocket

ACTIONS, KEYFRAMES, FILES = "actions", "keyframes", "files"
MOTIONS = [*paths.PRESETS, ACTIONS, KEYFRAMES, FILES]


class QuantWMCameraPath(io.ComfyNode):
    """Makes a QUANTWM_CAMERA: OpenCV camera-to-world poses, one a video frame, and intrinsics for 832 x 480.

    x points right, y down, z into the picture. What the model is told are the motions from each latent frame to the
    next, all translations divided by the longest: only their proportions count.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMCameraPath",
            display_name="Camera Path",
            category=CATEGORY,
            description=(
                "Describes where the camera goes, for LingBot Conditioning: a preset, keys and mouse as in a game, "
                "keyframes, or the pose files of LingBot-World. The second output shows the path from above."
            ),
            search_aliases=["quantwm", "lingbot", "camera trajectory", "wasd", "camera poses", "orbit", "dolly"],
            inputs=_inputs(),
            outputs=[
                CameraSocket.Output("camera", display_name="camera", tooltip="For LingBot Conditioning."),
                io.Image.Output("preview", display_name="preview", tooltip="The path from above; for Preview Image."),
            ],
        )

    @classmethod
    def validate_inputs(
        cls, motion: str | None = None, actions: str | None = None, keyframes: str | None = None
    ) -> bool | str:
        # Named inputs lose ComfyUI's own check of their choices. None is a linked value, not known yet.
        if motion is not None and motion not in MOTIONS:
            return f"motion must be one of {', '.join(MOTIONS)}; got {motion!r}. Pick a listed value."
        try:
            if motion == ACTIONS and actions is not None:
                paths.from_actions(actions, 1)
            if motion == KEYFRAMES and keyframes is not None:
                paths.from_keyframes(keyframes, 1)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, motion: str, folder: str, **others) -> tuple:
        """Read files again when they have changed."""
        stamps = ()
        if motion == FILES:
            files = (_input_folder(folder) / name for name in paths.FILES)
            stamps = tuple(file.stat().st_mtime_ns for file in files if file.is_file())
        return (motion, folder, *sorted(others.items()), stamps)

    @classmethod
    def execute(
        cls,
        motion: str,
        length: int,
        distance: float,
        angle: float,
        fov: float,
        actions: str,
        keyframes: str,
        folder: str,
    ) -> io.NodeOutput:
        if motion == FILES:
            camera = paths.from_files(_input_folder(folder), length, fov)
        else:
            keys = None
            if motion == ACTIONS:
                poses, keys = paths.from_actions(actions, length), paths.pressed_keys(actions, length)
            elif motion == KEYFRAMES:
                poses = paths.from_keyframes(keyframes, length)
            else:
                poses = paths.PRESETS[motion](length, distance=distance, angle=angle)
            camera = CameraPath(poses, intrinsics_for_fov(fov), keys)
        return io.NodeOutput(camera, chart_tensor(path_picture(camera.poses, camera.fov)))


def _inputs() -> list[io.Input]:
    return [
        io.Combo.Input(
            "motion",
            options=MOTIONS,
            default="walk",
            tooltip=(
                "How the path is described.\n"
                "orbit: around a point at distance ahead, by angle.\n"
                "dolly: straight ahead by distance.\n"
                "pan: turning on the spot by angle.\n"
                "walk (default): ahead by distance along an arc, turning by angle.\n"
                "actions, keyframes: as written below.\n"
                "files: poses.npy and intrinsics.npy in a folder."
            ),
        ),
        io.Int.Input(
            "length",
            default=81,
            min=1,
            max=16384,
            step=4,
            tooltip=(
                "Frames of the path, and so of the video: 4 n + 1, such as 81 (default; 5 seconds at 16 a second). "
                "What does not fill a block of the model is cut off, and the path is stretched to end with the video."
            ),
        ),
        io.Float.Input(
            "distance",
            default=2.0,
            min=-1000.0,
            max=1000.0,
            step=0.05,
            tooltip=(
                "How far the preset goes, or for orbit how far the point is. The model sees proportions only: an even "
                "dolly of 1 and of 10 are the same to it, but not a path of fast and slow parts."
            ),
        ),
        io.Float.Input(
            "angle",
            default=45.0,
            min=-3600.0,
            max=3600.0,
            step=1.0,
            tooltip="How far the preset turns in all, in degrees (default 45); negative for the other way.",
        ),
        io.Float.Input(
            "fov",
            default=90.0,
            min=5.0,
            max=170.0,
            step=0.5,
            tooltip=(
                "Horizontal angle of view in degrees. 90 (default) is that of the examples that come with the model; "
                "lower it for the look of a longer lens. Intrinsics in a file replace it."
            ),
        ),
        io.String.Input(
            "actions",
            default="w-20, wl-20, none-5, w[1.5/0]-20",
            multiline=True,
            tooltip=(
                "For motion actions: keys-frames, separated by commas. w a s d walk, i k look up and down, j l left "
                "and right (2 degrees a frame), none waits; [yaw/pitch] is the mouse, in degrees a frame."
            ),
        ),
        io.String.Input(
            "keyframes",
            default="0  0 0 0  0\n40  0 0 2  30\n80  1 0 3  90",
            multiline=True,
            tooltip=(
                "For motion keyframes: a line each, frame x y z yaw pitch roll. x right, y down, z ahead; degrees to "
                "the right, up and clockwise, of which the last may be left out. Straight between them."
            ),
        ),
        io.String.Input(
            "folder",
            default="",
            tooltip=(
                "For motion files: a folder inside of ComfyUI's input folder with poses.npy [frames, 4, 4] "
                "(camera to world, OpenCV) and, if you like, intrinsics.npy [frames, 4] (fx, fy, cx, cy at 832 x 480) "
                "and action.npy [frames, 4] (w, a, s, d, for act variants)."
            ),
        ),
    ]


def _input_folder(name: str) -> Path:
    """The folder of that name inside of ComfyUI's input folder, and nowhere else."""
    root = Path(folder_paths.get_input_directory()).resolve()
    folder = (root / name.strip()).resolve()
    if not name.strip() or not folder.is_relative_to(root) or not folder.is_dir():
        raise ValueError(
            f"folder must be the name of a folder inside of ComfyUI's input folder; got {name!r}. Copy the folder with "
            f"{paths.POSES_FILE} there."
        )
    return folder

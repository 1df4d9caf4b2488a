"""Camera paths: presets by their geometry, key presses against the public code's own walk, files and what is wrong."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from safetensors.torch import load_file

from benchmarks.host import ROOT
from support import lingbot_case as case

pytestmark = pytest.mark.host

REFERENCE = ROOT / "tests" / "world_models" / "data" / "lingbot_reference.safetensors"


@pytest.fixture(scope="module")
def paths(host):
    return importlib.import_module("quantwm_pack.world_models.lingbot.paths")


@pytest.fixture(scope="module")
def lingbot(host):
    return importlib.import_module("quantwm_pack.world_models.lingbot")


def heading(poses: np.ndarray) -> np.ndarray:
    """Degrees to the right of z in which each camera looks."""
    return np.degrees(np.arctan2(poses[:, 0, 2], poses[:, 2, 2]))


def test_orbit_keeps_its_distance_and_looks_at_the_centre(paths):
    poses = paths.orbit(7, distance=2.0, angle=90)
    to_centre = np.array([0, 0, 2]) - poses[:, :3, 3]
    np.testing.assert_allclose(np.linalg.norm(to_centre, axis=1), 2)
    np.testing.assert_allclose(poses[:, :3, 2], to_centre / 2, atol=1e-12)
    assert poses[-1, 0, 3] > 1.9  # a positive angle goes to the right


def test_dolly_pan_and_walk(paths):
    dolly = paths.dolly(5, distance=-2.0, angle=45)
    np.testing.assert_allclose(dolly[:, :3, 3], np.linspace(0, -2, 5)[:, None] * [0, 0, 1])
    assert not heading(dolly).any()
    pan = paths.pan(5, distance=3.0, angle=-60)
    np.testing.assert_allclose(heading(pan), np.linspace(0, -60, 5))
    assert not pan[:, :3, 3].any()
    walk = paths.walk(9, distance=3.0, angle=80)
    steps = np.diff(walk[:, :3, 3], axis=0)
    np.testing.assert_allclose(np.linalg.norm(steps, axis=1), 3 / 8)
    # Each step goes where the camera looks half way between its two poses.
    np.testing.assert_allclose(np.degrees(np.arctan2(steps[:, 0], steps[:, 2])), np.linspace(5, 75, 8))
    assert all(len(make(1, distance=1.0, angle=9.0)) == 1 for make in paths.PRESETS.values())


def test_keys_walk_as_in_the_public_code(paths):
    walk = load_file(REFERENCE)["walk"].numpy()
    np.testing.assert_allclose(paths.from_actions(case.ACTIONS, len(walk)), walk, atol=1e-6)


def test_pressed_keys_of_an_action_text(paths):
    """A row a frame, w a s d; what turns the camera is no key of these, and nothing is pressed behind the end."""
    pressed = paths.pressed_keys("w-2, AD-1, il-1, none-1, sw[3/0]-2", 9)
    rows = [[1, 0, 0, 0]] * 2 + [[0, 1, 0, 1]] + [[0, 0, 0, 0]] * 2 + [[1, 0, 1, 0]] * 2 + [[0, 0, 0, 0]] * 2
    assert pressed.tolist() == rows and paths.pressed_keys("w-20", 3).tolist() == [[1, 0, 0, 0]] * 3


def test_keys_go_with_the_poses_of_a_file(paths, lingbot, tmp_path):
    """Every fourth row; where latent frames are cut to whole blocks, the row nearest to the stretched pose."""
    np.save(save(tmp_path, case.poses(41)) / "action.npy", case.keys(41))
    path = paths.from_files(tmp_path, 33, 90.0)
    whole, cut = (lingbot.latent_camera(path, 33, latents).keys for latents in (9, 8))
    assert whole.tolist() == case.keys(41)[:33:4].tolist()
    assert cut.tolist() == case.keys(41)[[0, 5, 9, 14, 18, 23, 27, 32]].tolist()
    (tmp_path / "action.npy").unlink()
    assert paths.from_files(tmp_path, 33, 90.0).keys is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (np.zeros((9, 3)), r"a row of four .* for each of 9 frames; got shape \[9, 3\]"),
        (np.zeros((5, 4)), r"for each of 9 frames; got shape \[5, 4\]"),
        (np.full((9, 4), 0.5), "keys must be 0 or 1"),
        (np.full((9, 4), np.nan), "keys must be 0 or 1"),
    ],
    ids=["three keys", "too few", "half pressed", "not a number"],
)
def test_wrong_keys(paths, tmp_path, keys, message):
    np.save(save(tmp_path, EYES) / "action.npy", keys)
    with pytest.raises(ValueError, match=message):
        paths.from_files(tmp_path, 9, 90.0)


def test_keys_wait_at_the_end_and_are_cut(paths):
    longer, shorter = paths.from_actions("w-2, L-1", 6), paths.from_actions("w-2, L-1", 3)
    np.testing.assert_array_equal(longer[:3], shorter)
    assert (longer[3:] == longer[3]).all() and heading(longer)[-1] == pytest.approx(2)


def test_the_mouse_turns_and_stops_before_the_zenith(paths):
    poses = paths.from_actions("[1.5/40]-3", 4)
    np.testing.assert_allclose(heading(poses)[1:3], [1.5, 3])
    assert -poses[2, 1, 2] == pytest.approx(np.sin(np.radians(80)))
    np.testing.assert_allclose(-poses[3, 1, 2], np.sin(np.radians(80)))  # 120 degrees would look behind


def test_keyframes(paths):
    poses = paths.from_keyframes("0: 0 0 0 0\n\n4, 2 0 4 90 0 0\n", 7)
    np.testing.assert_allclose(poses[:, 0, 3], [0, 0.5, 1, 1.5, 2, 2, 2])
    np.testing.assert_allclose(heading(poses), [0, 22.5, 45, 67.5, 90, 90, 90])
    tilted = paths.from_keyframes("3 0 0 0 0 30 90", 2)
    np.testing.assert_allclose(tilted[0, :3, 2], [0, -0.5, np.sqrt(0.75)], atol=1e-12)  # looks up; y points down
    np.testing.assert_allclose(tilted[0, 1:3, 0], [np.sqrt(0.75), 0.5], atol=1e-12)  # its right side points down


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "actions is empty"),
        ("w-3, x-2", "cannot read 'x-2': 'x' is no key"),
        ("w-3,,d-2", "cannot read ''"),
        ("w3", "cannot read 'w3': it is not keys-frames"),
        ("w-0", "cannot read 'w-0'"),
        ("w[1..5/0]-3", "the mouse in"),
    ],
)
def test_actions_that_cannot_be_read(paths, text, message):
    with pytest.raises(ValueError, match=message):
        paths.from_actions(text, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" \n", "keyframes is empty"),
        ("0 0 0", "cannot read '0 0 0'"),
        ("0 0 0 0\nfour 0 0 1", "cannot read 'four 0 0 1'"),
        ("1.5 0 0 0", "cannot read"),
        ("0 0 0 nan", "cannot read"),
        ("4 0 0 0\n2 0 0 1", r"must rise from line to line; got \[4, 2\]"),
    ],
)
def test_keyframes_that_cannot_be_read(paths, text, message):
    with pytest.raises(ValueError, match=message):
        paths.from_keyframes(text, 9)


def save(folder, poses=None, intrinsics=None):
    for name, array in (("poses", poses), ("intrinsics", intrinsics)):
        if array is not None:
            np.save(folder / f"{name}.npy", array)
    return folder


def test_files_of_the_official_format(paths, tmp_path):
    folder = save(tmp_path, case.poses(30), case.intrinsics(30))
    path = paths.from_files(folder, 29, 90.0)
    np.testing.assert_allclose(path.poses, case.poses(30)[:29])
    assert path.intrinsics == (415.5, 417.25, 410.0, 236.5)
    (folder / "intrinsics.npy").unlink()
    assert paths.from_files(folder, 29, 90.0).intrinsics == pytest.approx((416, 416, 416, 240))


EYES = np.tile(np.eye(4), (9, 1, 1))


def changed(frame, row, column, value):
    poses = EYES.copy()
    poses[frame, row, column] = value
    return poses


@pytest.mark.parametrize(
    ("poses", "intrinsics", "message"),
    [
        (None, None, "no poses.npy in"),
        (EYES[:, :3], None, r"shape \[frames, 4, 4\]; got \[9, 3, 4\]"),
        (EYES[:5], None, "has 5 poses, one a frame, but length is 9. Set length to 5"),
        (changed(4, 0, 3, np.nan), None, "the pose of frame 4 is not"),
        (changed(6, 0, 0, 1.5), None, "that of frame 6 is off by 1.25"),
        (changed(2, 1, 1, -1), None, "that of frame 2 is off by 2 .*mirroring"),
        (np.array([{"a": 1}]), None, "poses.npy is no plain NumPy array"),
        (np.array(["a"]), None, "poses.npy must be an array of real numbers"),
        (EYES.astype(complex), None, "poses.npy must be an array of real numbers"),
        (EYES.astype(bool), None, "poses.npy must be an array of real numbers"),
        (EYES[:0], None, r"got \[0, 4, 4\]"),
        (EYES, np.zeros((0, 4)), r"shape \[frames, 4\]; got \[0, 4\]"),
        (EYES, np.tile(np.eye(3), (9, 1, 1)), r"shape \[frames, 4\]; got \[9, 3, 3\]"),
        (EYES, np.array([[960.0, 960, 960, 540]]), "axis must meet the picture; got cx, cy = 960, 540.*832 x 480"),
        (EYES, np.ones((9, 3)), r"intrinsics.npy .* shape \[frames, 4\]; got \[9, 3\]"),
        (EYES, np.zeros((9, 4)), r"positive focal lengths; got \[0.0, 0.0, 0.0, 0.0\]"),
    ],
)
def test_wrong_files(paths, tmp_path, poses, intrinsics, message):
    with pytest.raises(ValueError, match=message):
        paths.from_files(save(tmp_path, poses, intrinsics), 9, 90.0)


@pytest.mark.parametrize("content", [b"no array", b"", b"\x93NUMPY"])
def test_files_that_are_no_arrays(paths, tmp_path, content):
    """The remedy is not NumPy's, which is to run what a pickle holds."""
    (tmp_path / "poses.npy").write_bytes(content)
    with pytest.raises(ValueError, match="poses.npy is no plain NumPy array, or not all of it") as caught:
        paths.from_files(tmp_path, 9, 90.0)
    assert "allow_pickle" not in str(caught.value)


@pytest.mark.parametrize("far", [1e7, 1e30])
def test_small_steps_far_from_the_origin_are_not_lost(lingbot, paths, far):
    """Coordinates of a map: steps of a few centimetres at 10,000 km, and more than float32 can hold."""
    poses = np.tile(np.eye(4), (9, 1, 1))
    poses[:, 2, 3] = far + np.linspace(0, 1, 9) ** 2 * max(1.0, far * 1e-12)
    relative = lingbot.latent_camera(lingbot.CameraPath(poses, (416.0, 416.0, 416.0, 240.0)), 9, 3).poses
    assert relative[:, 2, 3].tolist() == pytest.approx([0, 1 / 3, 1], abs=1e-2)


def test_a_camera_that_stands_still_divides_by_nothing(lingbot, paths):
    path = lingbot.CameraPath(paths.pan(9, angle=0.0), (416.0, 416.0, 416.0, 240.0))
    camera = lingbot.latent_camera(path, 9, 3)
    assert camera.poses.isfinite().all() and not camera.poses[:, :3, 3].any()


def test_sizes_as_the_published_code_chooses_them(lingbot):
    """A 16:9 picture at 480p gives 58 x 104 latents, one of 832 x 480 gives 60 x 104."""
    assert lingbot.size_for(1920, 1080, 832 * 480) == (832, 464)
    assert lingbot.size_for(832, 480, 832 * 480) == (832, 480)


def test_lengths_are_cut_to_whole_blocks(lingbot):
    release = lingbot.RELEASES["v2 causal-fast"]
    assert (release.usable_frames(84), release.latents(84), release.latents(13)) == (81, 20, 4)
    with pytest.raises(ValueError, match="at least 13 frames long.*got 12"):
        release.latents(12)

"""World memory: WorldKV's formulas against plain float64 versions, the bank, and the window."""

import math

import pytest
import torch

from quantwm_core.memory import (
    Bank,
    CameraMotion,
    CameraPath,
    MemorySettings,
    Pose,
    kept_tokens,
    pose_distances,
    take_tokens,
)
from quantwm_core.window import Block, RolloutSettings, Window


def path(turn: float, frames: int, orbit: float = 0.3) -> CameraPath:
    walked = CameraPath()
    walked.extend(CameraMotion(turn, orbit, 40.0), frames)
    return walked


def random_pose(generator: torch.Generator) -> Pose:
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    rotation = rotation * torch.linalg.det(rotation).sign()
    return Pose(torch.randn(3, generator=generator, dtype=torch.float64), rotation)


def test_distances_are_worldkvs():
    """0.5 |t - t_j|^2 / max + 0.5 arccos((tr(R_j^T R) - 1) / 2) / max, written out in plain Python."""
    generator = torch.Generator().manual_seed(0)
    pose, *others = (random_pose(generator) for _ in range(8))
    shifts, turns = [], []
    for other in others:
        shifts.append(sum((float(a) - float(b)) ** 2 for a, b in zip(pose.position, other.position)))
        product = other.rotation.T @ pose.rotation
        turns.append(math.acos(max(-1.0, min(1.0, (sum(float(product[i, i]) for i in range(3)) - 1) / 2))))
    expected = [0.5 * shift / max(shifts) + 0.5 * turn / max(turns) for shift, turn in zip(shifts, turns)]
    torch.testing.assert_close(pose_distances(pose, others).tolist(), expected, rtol=1e-12, atol=1e-12)


def test_a_turn_on_the_spot_and_a_single_candidate_give_no_nan():
    still = path(0.0, 3, orbit=0.0)
    assert pose_distances(still.pose(0), [still.pose(1), still.pose(2)]).tolist() == [0, 0]


def test_path_follows_changing_motions():
    """Headings add up; after as many frames back as forth the camera looks where it looked before."""
    walked = path(20.0, 5)
    walked.extend(CameraMotion(-20.0, 0.3, 40.0), 5)
    heading = [
        math.degrees(math.atan2(float(p.rotation[1, 0]), float(p.rotation[0, 0]))) for p in map(walked.pose, range(10))
    ]
    assert heading == pytest.approx([0, 20, 40, 60, 80, 100, 80, 60, 40, 20])
    assert walked.pose(2).position.tolist() == pytest.approx(
        [0.3 * math.cos(math.radians(80)), 0.3 * math.sin(math.radians(80)), 0]
    )
    torch.testing.assert_close(walked.pose(8).position, walked.pose(2).position)


def test_nearest_views_return_and_of_equal_ones_the_newest():
    walked = path(18.0, 70)  # a turn is 20 frames
    bank = Bank(MemorySettings(blocks=3))
    assert bank.nearest(walked.pose(60)) == []
    for frame in range(50):
        bank.add(frame, walked.pose(frame))
    assert bank.nearest(walked.pose(63)) == [3, 23, 43]
    assert Bank(MemorySettings(blocks=1)).nearest(walked.pose(3)) == []
    few = Bank(MemorySettings(blocks=1))
    for frame in range(50):
        few.add(frame, walked.pose(frame))
    assert few.nearest(walked.pose(63)) == [43]


def test_a_full_bank_drops_what_a_newer_block_shows():
    walked = path(18.0, 70)
    bank = Bank(MemorySettings(bank_blocks=20))
    dropped = []
    for frame in range(43):
        bank.add(frame, walked.pose(frame))
        dropped += bank.take_surplus()
    assert sorted(dropped) == list(range(23)) and sorted(bank.poses) == list(range(23, 43))
    unposed = Bank(MemorySettings("similarity", bank_blocks=2))
    for frame in range(4):
        unposed.add(frame, None)
    assert unposed.take_surplus() == [0, 1]


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.9])
def test_compression_keeps_the_anchor_and_what_it_does_not_show(keep):
    """Tokens least like the anchor's mean key, by cosine over all heads, against plain float64 loops."""
    keys = torch.randn(2, 5 * 7, 3, 8, generator=torch.Generator().manual_seed(0))
    kept = kept_tokens(keys, 7, keep)
    for batch in range(2):
        rows = keys[batch].reshape(35, 24).double()
        reference = rows[:7].mean(0)
        cosine = {i: float(rows[i] @ reference / (rows[i].norm() * reference.norm())) for i in range(7, 35)}
        least = sorted(cosine, key=cosine.get)[: round(keep * 28)]
        assert kept[batch].tolist() == [*range(7), *sorted(least)]
    assert torch.equal(take_tokens(keys, kept)[1], keys[1, kept[1]])


def test_compression_leaves_single_frames_and_keep_one_alone():
    keys = torch.randn(1, 12, 2, 8)
    assert kept_tokens(keys, 12, 0.5) is None and kept_tokens(keys, 4, 1.0) is None


def test_window_holds_the_sink_and_the_newest_whole_blocks():
    window = Window(RolloutSettings(frames_per_block=3, window=7, sink=4))
    left = []
    for frames in (3, 3, 3, 3, 3, 2):
        window.add(frames)
        left += window.take_leaving()
    # Frame 3, the last of the sink, is in the second block.
    assert left == [Block(2, 6, 3), Block(3, 9, 3)]
    assert [block.number for block in window.blocks] == [0, 1, 4, 5] and window.frames == 11


@pytest.mark.parametrize(
    ("settings", "frames", "given", "returning", "expected"),
    [
        ({}, 40, 0, 0, 40),
        ({"window": 9}, 40, 0, 0, 12),
        ({"window": 9, "sink": 4}, 40, 0, 2, 4 + 2 + 9 + 3 * 3),
        ({"window": 9}, 40, 21, 0, 21),
        ({"window": 36}, 30, 0, 6, 30),
    ],
)
def test_room_is_enough_and_no_more_than_the_video(settings, frames, given, returning, expected):
    assert RolloutSettings(frames_per_block=3, **settings).room(frames, given, returning) == expected


@pytest.mark.parametrize("seed", range(6))
def test_room_holds_whatever_a_rollout_keeps(seed):
    """Odd blocks, sinks and given frames: history and the coming block never exceed the room."""
    draw = torch.Generator().manual_seed(seed)
    block, sink, given = (
        int(torch.randint(low, high, (1,), generator=draw)) for low, high in ((1, 6), (0, 9), (0, 20))
    )
    settings = RolloutSettings(block, block + int(torch.randint(0, 9, (1,), generator=draw)), sink)
    window, room = Window(settings), settings.room(60, given)
    for length in settings.block_lengths(given):
        window.add(length)
    window.take_leaving()
    for length in settings.block_lengths(60 - given):
        assert window.frames + length <= room
        window.add(length)
        window.take_leaving()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retrieval": "pose"}, "retrieval must be one of camera, similarity, off; got 'pose'"),
        ({"blocks": 0}, "blocks must be a whole number from 1"),
        ({"bank_device": "disk"}, "bank_device must be one of gpu, cpu"),
        ({"bank_blocks": -1}, "bank_blocks must be"),
        ({"keep": 0.0}, "keep must be above 0 and at most 1"),
        ({"keep": 1.1}, "got 1.1. Change keep"),
    ],
)
def test_settings_are_refused_with_rule_value_and_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        MemorySettings(**options)

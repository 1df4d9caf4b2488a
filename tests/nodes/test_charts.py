"""The chart draws every record that a run can leave, and the right proportions."""

import importlib

import numpy as np
import pytest

pytestmark = pytest.mark.host

PARTS = {"codes": 800, "ids": 30, "centroids": 60, "scales": 50, "zeros": 30, "psac_c": 20, "psac_u": 10}
NOTHING_PACKED = {"bytes_packed": 0, "bytes_by_part": {}, "ratio_packed": 1.0, "ratio_resident": 1.0}


@pytest.fixture(scope="module")
def charts(host):
    return importlib.import_module("quantwm_pack.nodes.charts")


def record(scale: int = 1000, **changes) -> dict:
    parts = {key: count * scale for key, count in PARTS.items()}
    packed, full = sum(parts.values()), 6000 * scale
    return {
        "method": "quantwm",
        "key_bits": 2,
        "value_bits": 2,
        "backend": "torch",
        "layers": 6,
        "heads": 2,
        "head_dim": 128,
        "tokens": 3456,
        "blocks": 12,
        "bytes_bf16": full,
        "bytes_packed": packed,
        "bytes_unpacked": 0,
        "bytes_state": 0,
        "bytes_workspace_peak": 0,
        "bytes_by_part": parts,
        "ratio_packed": full / packed,
        "ratio_resident": full / packed,
    } | changes


def history(blocks: int, full: int = 6_000_000, packed: int = 1_000_000) -> list[dict]:
    return [
        {
            "block": i,
            "tokens": 288 * (i + 1),
            "bytes_bf16": full * (i + 1) // blocks,
            "bytes_packed": packed * (i + 1) // blocks,
            "bytes_unpacked": 0,
            "seconds": 0.1,
        }
        for i in range(blocks)
    ]


def pixels(image, color: str) -> int:
    """How many pixels have this colour, but for the ringing that scaling down leaves at edges."""
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return int((abs(np.asarray(image, dtype=int) - wanted) <= 12).all(-1).sum())


def test_bars_are_to_scale(charts):
    image = charts.memory_chart(record(), history(12))
    codes = pixels(image.crop(charts.LEFT), "#5b9cff")
    # Codes fill 80 % of the wide bar, and 800 of 6000 of the narrow one; both are as high.
    left, _, right, _ = charts.LEFT
    expected = (right - left - 56) * charts.BAR * (0.8 + 800 / 6000)
    assert abs(codes - expected) < 0.03 * expected


@pytest.mark.parametrize("blocks", [0, 1, 2, 7, 240])
@pytest.mark.parametrize("scale", [1, 1000, 40_000_000])
def test_any_length_and_size(charts, blocks, scale):
    image = charts.memory_chart(record(scale), history(blocks, 6000 * scale, 1000 * scale))
    assert image.size == (charts.WIDTH, charts.HEIGHT)


def test_run_that_packed_nothing(charts):
    full = record()["bytes_bf16"]
    off = record(**NOTHING_PACKED, method="off", bytes_unpacked=full)
    image = charts.memory_chart(off, history(3, full, full))
    assert pixels(image, charts.UNPACKED[1]) > 2 * 600 * charts.BAR


def test_empty_run_and_unknown_part(charts):
    empty = record(**NOTHING_PACKED, bytes_bf16=0, tokens=0)
    charts.memory_chart(empty, [])
    with_signs = record(bytes_by_part={**record()["bytes_by_part"], "signs": 400_000})
    image = charts.memory_chart(with_signs, history(2))
    assert pixels(image, charts.OTHER_COLORS[0]) > 1000


def test_no_run_yet(charts):
    image = charts.memory_chart(None, [])
    tensor = charts.chart_tensor(image)
    assert tensor.shape == (1, charts.HEIGHT, charts.WIDTH, 3)
    assert 0 <= tensor.min() and tensor.max() <= 1 and pixels(image, charts.PANEL) > 500_000

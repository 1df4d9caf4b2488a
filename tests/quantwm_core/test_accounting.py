"""Words and numbers that people read."""

import json

import pytest
import torch

from quantwm_core import CacheGeometry, CacheHandle, CacheSettings, WorldCache, format_report
from quantwm_core.accounting import (
    against_bf16,
    build_record,
    estimate_bytes,
    format_bytes,
    joined_entries,
    native_record,
)
from quantwm_core.packing import GROUP_BYTES, layers_together, waiting_bytes
from quantwm_core.stopwatch import Stopwatch


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(6.27, "6.3x smaller than BF16"), (1.0, "as large as BF16"), (0.5, "2.0x larger than BF16")],
)
def test_ratio_in_words(ratio, words):
    assert against_bf16(ratio) == words


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1023 * 1024, "0.999 MiB"), (20 << 20, "20 MiB"), (6_899_630_080, "6.43 GiB")],
)
def test_bytes_in_words(count, text):
    assert format_bytes(count) == text


def test_report_ends_with_the_record_and_says_when_there_is_none():
    settings = CacheSettings(method="off")
    handle = CacheHandle(settings)
    assert "Nothing sampled yet" in format_report(handle)
    geometry = CacheGeometry(2, 2, 64)
    handle.record = native_record(settings, geometry, 100, 2 * geometry.bytes_bf16(100))
    lines = format_report(handle).splitlines()
    assert lines[0].startswith("2.0x larger than BF16") and json.loads(lines[-1]) == handle.record


def test_memory_is_planned_for_what_settings_keep_in_full_precision():
    geometry = CacheGeometry(30, 12, 128)
    full = geometry.bytes_bf16(37_440)
    # One decoded layer, and blocks that wait for the other layers of their group.
    layer, waiting = full / 30, waiting_bytes(30, 4 * 12 * 128)
    assert waiting <= 2 * GROUP_BYTES
    assert estimate_bytes(CacheSettings(), geometry, 37_440) < 0.3 * full
    # One layer decoded, and two packed: the one that is read and the next, on its way from the CPU.
    on_cpu = estimate_bytes(CacheSettings(cache_device="cpu"), geometry, 37_440)
    assert on_cpu == pytest.approx(layer + 2 * layer * (2 + 1.25) / 16 + waiting)
    mixed = estimate_bytes(CacheSettings(bit_overrides="0-14=16, 15.0-5=8"), geometry, 37_440)
    bits = 15 / 30 * 16 + (6 * 9.25 + 6 * 3.25) / 12 / 30 + 14 / 30 * 3.25
    assert mixed == pytest.approx(layer + full * bits / 16 + waiting)
    corrected = estimate_bytes(CacheSettings(cache_device="cpu", jensen="exact"), geometry, 37_440)
    assert corrected == pytest.approx(on_cpu + layer)
    for kept in ({"keep_recent_blocks": 64}, {"span_blocks": 8}, {"cache_device": "cpu", "keep_first_blocks": 1}):
        assert estimate_bytes(CacheSettings(**kept), geometry, 37_440) == pytest.approx(full + layer + waiting)


@pytest.mark.parametrize(
    ("heads", "block"),
    [(12, 3 * 1560), (12, 3 * 3600), (12, 21 * 1560), (40, 4 * 1560), (40, 4 * 3600), (2, 7)],
    ids=["480p", "720p", "21 given frames", "14B", "14B at 720p", "tiny"],
)
def test_a_group_keeps_its_bound_whatever_the_block(heads, block):
    """Blocks waiting for each other fit the bound, unless one layer's block alone is larger."""
    geometry = CacheGeometry(30, heads, 128)
    width = geometry.bytes_bf16(1) // 30
    together = layers_together(30, width, block)
    assert together == 1 or together * block * width <= GROUP_BYTES
    assert waiting_bytes(30, width, block) == (2 if together > 1 else 1) * together * block * width
    planned = estimate_bytes(CacheSettings(), geometry, 8 * block, block=block)
    stored = geometry.bytes_bf16(8 * block) * (3.25 / 16 + 1 / 30)
    assert planned == pytest.approx(stored + waiting_bytes(30, width, block))
    cache = WorldCache(CacheSettings(), geometry, block=block)
    assert len({id(layer.packer) for layer in cache.layers}) == -(-30 // together)


def test_second_order_correction_of_kivi_reads_three_layers():
    """Its keys have a step for every channel: the form with appended channels is twice as wide."""
    geometry = CacheGeometry(30, 12, 128)
    layer = geometry.bytes_bf16(37_440) / 30
    plain, exact, second = (
        estimate_bytes(CacheSettings("kivi", jensen=jensen), geometry, 37_440)
        for jensen in ("off", "exact", "second-order")
    )
    assert (exact - plain, second - plain) == (pytest.approx(layer), pytest.approx(2 * layer))


def test_a_block_of_several_conditionings_counts_for_all():
    torch.manual_seed(0)
    caches = [WorldCache(CacheSettings(), CacheGeometry(2, 2, 64)) for _ in range(2)]
    for cache in caches:
        for layer in range(2):
            k, v, q = torch.randn(3, 1, 36, 2, 64).unbind(0)
            cache.layers[layer].append(k, v, q)
            cache.commit(layer)
    entry, record = joined_entries([cache.history[0] for cache in caches]), build_record(caches)
    for name in ("bytes_bf16", "bytes_packed", "bytes_by_part", "tokens", "backend"):
        assert entry[name] == record[name], name
    assert entry["bytes_unpacked"] == record["bytes_unpacked"] + record["bytes_state"]
    assert joined_entries([caches[0].history[0]]) == caches[0].history[0]


def test_a_stopwatch_tells_during_a_run_what_it_will_tell_at_the_end():
    watch = Stopwatch()
    for _ in range(3):
        with watch:
            sum(range(10_000))
        assert 0 < watch.finished_seconds() == watch.seconds()

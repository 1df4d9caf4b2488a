"""Planned bytes against the storages of real encodings."""

import json

import pytest
import torch

from benchmarks.host import ROOT
from benchmarks.memory import GEOMETRIES, layouts
from quantwm_core import METHODS, CacheGeometry, CacheSettings, WorldCache
from quantwm_core.planning import CachePlan, plan_bytes

PACKING = [method for method in METHODS if method != "off"]
BITS = [(2, 2), (4, 4), (8, 8), (4, 2), (2, 8), (2, 16), (16, 4)]
BLOCKS = (97, 200, 200, 61, 200, 1)


def real_record(settings: CacheSettings, geometry: CacheGeometry, blocks: tuple[int, ...]) -> dict:
    """Record of a cache that packed structured random keys and values."""
    generator = torch.Generator().manual_seed(0)
    heads, width = geometry.heads, geometry.head_dim
    mixing = torch.randn(heads, width, width, generator=generator)
    centers = torch.randn(16, width, generator=generator) * torch.logspace(0.5, -0.5, width)
    cache = WorldCache(settings, geometry, value_metrics=[lambda: mixing @ mixing.transpose(1, 2)] * geometry.layers)
    for tokens in blocks:
        for layer in range(geometry.layers):
            shape = (geometry.batch, tokens, heads)
            k, v, q = (
                (centers[torch.randint(16, shape, generator=generator)] + 0.3 * torch.randn(*shape, width)).bfloat16()
                for _ in range(3)
            )
            cache.layers[layer].read(k, v)
            cache.layers[layer].append(k, v, q)
            cache.commit(layer)
    return cache.record()


def check(settings: CacheSettings, geometry: CacheGeometry, blocks: tuple[int, ...] = BLOCKS) -> None:
    torch.manual_seed(0)
    record, planned = real_record(settings, geometry, blocks), plan_bytes(settings, geometry, blocks)
    assert (planned.tokens, planned.bf16) == (record["tokens"], record["bytes_bf16"])
    assert planned.workspace == record["bytes_workspace_peak"]
    # What a correction by earlier queries stores depends on the values; it is planned at its largest.
    sure = [part for part in record["bytes_by_part"] if part != "psac_c" or settings.method != "quantwm-paper"]
    assert {p: planned.parts[p] for p in sure} == {p: record["bytes_by_part"][p] for p in sure}
    assert (planned.unpacked, planned.state) == (record["bytes_unpacked"], record["bytes_state"])
    assert record["bytes_packed"] <= planned.packed <= 1.02 * record["bytes_packed"]


@pytest.mark.parametrize("bits", BITS, ids=lambda bits: f"K{bits[0]}V{bits[1]}")
@pytest.mark.parametrize("method", PACKING)
def test_plan_equals_what_was_stored(method, bits):
    check(CacheSettings(method, *bits), CacheGeometry(3, 2, 48))


@pytest.mark.parametrize("method", PACKING)
@pytest.mark.parametrize(
    "options",
    [
        {"span_blocks": 2},
        {"keep_first_blocks": 1, "keep_recent_blocks": 2},
        {"group_size": 32, "centroids": 100, "rank": 5},
        {"bit_overrides": "0=4/2, 1.1=16"},
        {"keep_recent_blocks": 1, "span_blocks": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_plan_follows_every_setting(method, options):
    check(CacheSettings(method, **options), CacheGeometry(3, 3, 40))


@pytest.mark.parametrize("method", PACKING)
@pytest.mark.parametrize("layers", [1, 2])
def test_plan_of_two_worlds_and_of_a_layer_alone(method, layers):
    check(CacheSettings(method), CacheGeometry(layers, 2, 64, batch=2), (130, 65))


def measured() -> list[tuple]:
    """Rows of the memory benchmark whose history only grows, with what they measured."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "memory-cpu.json").read_text())["rows"]
    ratios = {(row["geometry"], row["layout"]): row["ratio_resident"] for row in rows}
    return [
        pytest.param(geometry, settings, ratios[geometry.name, name], id=f"{geometry.name}-{name}")
        for geometry in GEOMETRIES
        for name, settings in layouts(geometry).items()
        # Its running moment of queries is in the benchmark's figure; a run that fills the cache at once keeps none.
        if not geometry.window and not (name == "paper" and len(geometry.blocks) == 1)
        if (geometry.name, name) in ratios
    ]


@pytest.mark.parametrize(("geometry", "settings", "ratio"), measured())
def test_plan_at_full_size_equals_what_the_memory_benchmark_measured(geometry, settings, ratio):
    shape = CacheGeometry(geometry.layers, geometry.heads, geometry.head_dim)
    planned = plan_bytes(settings, shape, geometry.blocks)
    assert planned.bf16 / planned.resident == pytest.approx(ratio, rel=1e-4)


def test_a_prefilled_cache_has_the_published_budget():
    """LongCat-Video with 73 given frames: the paper's 3.625 GiB (appendix D); without rehearsal no correction."""
    paper = CacheSettings("quantwm-paper", centroids=256, rank=8)
    geometry = CacheGeometry(48, 32, 128)
    planned, alone = (plan_bytes(paper, geometry, [29640], prefilled=first) for first in (True, False))
    # The correction is planned dense, as published.
    assert planned.packed / 2**30 == pytest.approx(3.625, abs=1e-3) and planned.state == 0
    assert planned.parts["psac_c"] > 0 == alone.parts["psac_c"]


def test_plan_equals_a_whole_run_on_a_gpu():
    """Causal-Forcing's shape, 93 frames of 832 x 480, as `benchmarks.generate` measured it."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "generate-h200.json").read_text())["rows"]
    row = next(row for row in rows if row["method"] == "quantwm")
    planned = plan_bytes(CacheSettings(), CacheGeometry(30, 12, 128), [4680] * 8)
    assert planned.resident / 2**30 == pytest.approx(row["resident_gib"], rel=1e-4)
    # The run's peak has activations too.
    assert 0.9 * row["peak_gib_without_weights"] < planned.peak / 2**30 < row["peak_gib_without_weights"]


@pytest.mark.parametrize("method", ["quantwm", "rtn", "off"])
def test_guidance_doubles_what_is_stored_and_not_what_is_read(method):
    """Two prompts remember; they are asked in turn, so one layer is decoded and one group waits at a time."""
    bits = (16, 16) if method == "off" else (2, 2)
    settings, geometry = CacheSettings(method, *bits), CacheGeometry(4, 3, 64)
    one, two = (CachePlan(settings, geometry, 2, conditionings=count) for count in (1, 2))
    for plan in (one, two):
        for _ in range(3):
            plan.append(100)
    one, two = one.bytes(), two.bytes()
    assert (two.bf16, two.resident, two.on_device) == (2 * one.bf16, 2 * one.resident, 2 * one.on_device)
    assert (two.workspace, two.waiting, two.tokens) == (one.workspace, one.waiting, one.tokens)

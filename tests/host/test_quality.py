"""A row of benchmarks.quality on one short tiny world, and the methods of the ablation rows."""

import pytest
import torch

from benchmarks.ablations import ABLATIONS, Variant
from benchmarks.quality import build_method, measure
from benchmarks.tiny_rollout import prepare, sample


@pytest.fixture(scope="module")
def worlds(host):
    return prepare([1000], seed_frames=6, length=9)


@pytest.fixture(scope="module")
def reference(worlds):
    return worlds.decode(sample(worlds, worlds.model, 0))


def test_a_row_has_all_figures(worlds, reference):
    row = measure(Variant("rtn"), worlds, [reference])
    assert 10 < row["psnr_mean"] < 60 and 0 < row["ssim_mean"] < 1 and row["flicker"] > 0
    assert row["top1_shift"] > 0 and row["logit_mse"] > 0 and row["attention_error"] > 0
    assert all(len(layers) == 6 and len(layers[0]) == 2 for layers in row["by_head"].values())
    assert row["encode_seconds"] > 0 and row["decode_seconds"] > 0


def test_an_uncompressed_row_is_equal(worlds, reference):
    row = measure(Variant("off"), worlds, [reference])
    assert row["psnr_mean"] == 100 and row["ssim_mean"] == 1 and row["flicker"] == 0
    assert row["top1_shift"] == row["logit_mse"] == row["attention_error"] == 0
    assert row["by_head"]["logit_mse"] == []


@pytest.mark.parametrize(("series", "method"), sorted({(v.series, v.method) for v in ABLATIONS}))
def test_rows_of_an_ablation_really_differ(host, series, method):
    """Keys and queries with strong directions, so that every part and knob has something to decide."""
    core = host.quantwm_core
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1500, 1, 128, generator=generator) * torch.linspace(0.2, 3, 128)
    mixing = torch.randn(128, 128, generator=generator) * torch.linspace(0, 2, 128)
    moment = core.query_stats.second_moment(torch.randn(1, 50, 1, 128, generator=generator) @ mixing)
    stats = core.query_stats.QueryStats(moment, moment)
    seen = []
    for variant in (v for v in ABLATIONS if (v.series, v.method) == (series, method)):
        encoder = build_method(variant, core.CacheSettings(method=method, **variant.settings))
        decoded, _ = encoder.decode(encoder.encode(keys, keys, stats, core.methods.LayerState()))
        assert (decoded - keys).square().mean() < 0.5 * keys.square().mean()
        assert not any(torch.equal(decoded, other) for other in seen), variant.name
        seen.append(decoded)

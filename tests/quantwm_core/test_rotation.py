"""Keys that are stored before RoPE, against plain float64."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantwm_core import CacheGeometry, CacheSettings, LayerCache, WorldCache
from quantwm_core.codec.psac import decode_coefficients_int4
from quantwm_core.head_groups import HeadGroups
from quantwm_core.inspection import inspect_file
from quantwm_core.jensen import key_bias
from quantwm_core.methods import LayerState, build_method
from quantwm_core.query_stats import QueryStats, second_moment
from quantwm_core.rotation import Rotation, check_rotation, joined_rotation
from quantwm_core.span import PackedSpan, RawBlock, storage_bytes

METHODS = ("quantwm", "quantwm-paper", "rtn", "kivi", "qvg", "qvg-pro", "quarot")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rope(tokens: int, width: int, first: int = 0) -> Rotation:
    """Usual frequencies, from one turn in six tokens to one in many."""
    angles = torch.arange(first, first + tokens).unsqueeze(1) * 10000.0 ** -(torch.arange(width // 2) * 2 / width)
    return Rotation(angles.cos(), angles.sin())


def plain_rope(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Float64, channel by channel, from the formula."""
    out = torch.empty_like(x, dtype=torch.double)
    for pair in range(x.shape[-1] // 2):
        cos, sin = (t[:, pair].double().view(1, -1, 1) for t in rotation.tensors)
        a, b = x[..., 2 * pair].double(), x[..., 2 * pair + 1].double()
        out[..., 2 * pair], out[..., 2 * pair + 1] = a * cos - b * sin, a * sin + b * cos
    return out


def turn_matrix(rotation: Rotation, token: int) -> torch.Tensor:
    """`[D, D]` with turned = matrix @ key."""
    cos, sin = (t[token].double() for t in rotation.tensors)
    return torch.block_diag(*(torch.tensor([[c, -s], [s, c]]) for c, s in zip(cos.tolist(), sin.tolist()))).double()


def rotated_layer(rotation, *blocks, **settings) -> LayerCache:
    """A layer that holds blocks (k, v, q), each with its part of the rotation."""
    s = CacheSettings(**settings)
    layer, start = LayerCache(s, build_method(s)), 0
    for k, v, q in blocks:
        layer.append(k, v, q, rotation=rotation.cut(slice(start, start + k.shape[1])))
        layer.commit()
        start += k.shape[1]
    return layer


def test_rotation_is_the_formula_and_comes_undone():
    x, rotation = normal(2, 13, 3, 48), rope(13, 48)
    torch.testing.assert_close(rotation.apply(x).double(), plain_rope(x, rotation), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotation.undo(rotation.apply(x)), x)
    by_heads = x.transpose(1, 2).flatten(0, 1)
    turned = rotation.apply_by_heads(by_heads).unflatten(0, (2, 3)).transpose(1, 2)
    assert torch.equal(turned, rotation.apply(x))
    assert rotation.apply(x.bfloat16()).dtype == torch.bfloat16


def test_metric_before_rope_is_the_mean_over_tokens():
    rotation, base = rope(11, 20, first=5), normal(2, 20, 20)
    metric = base @ base.transpose(1, 2)
    turns = [turn_matrix(rotation, token) for token in range(11)]
    expected = sum(turn.T @ metric.double() @ turn for turn in turns) / 11
    torch.testing.assert_close(rotation.seen(metric).double(), expected, rtol=1e-5, atol=1e-4)


def test_pairs_that_turn_all_the_way_round_weigh_alike():
    angles = torch.arange(64).unsqueeze(1) * torch.tensor([math.pi / 8, 0.0])
    metric = torch.diag(torch.tensor([9.0, 1.0, 9.0, 1.0])).unsqueeze(0)
    seen = Rotation(angles.cos(), angles.sin()).seen(metric)[0]
    torch.testing.assert_close(seen.diagonal(), torch.tensor([5.0, 5.0, 9.0, 1.0]))


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize("method", METHODS)
def test_decoded_keys_come_after_rope(method, bits):
    k, v = normal(2, 30, 3, 48), normal(2, 30, 3, 48, seed=1)
    rotation = rope(30, 48, first=100)
    chosen = build_method(CacheSettings(method=method, key_bits=bits))
    moment = second_moment(rotation.apply(normal(2, 30, 3, 48, seed=2)))
    span = chosen.encode(k, v, QueryStats(moment, moment, rotation), LayerState())
    keys, _ = chosen.decode(span)
    expected = plain_rope(k, rotation)
    error = (keys.double() - expected).norm() / expected.norm()
    assert error < {2: 0.7, 4: 0.15, 8: 0.02, 16: 1e-6}[bits]


@pytest.mark.parametrize("method", ["quantwm", "quantwm-paper"])
def test_correction_is_kept_and_added_after_rope(method):
    """K^ = RoPE(K^_0) + C U^T, and C are the coordinates of the rotated error along U."""
    k, v, rotation = normal(1, 40, 1, 32), normal(1, 40, 1, 32, seed=1), rope(40, 32, first=9)
    chosen = build_method(CacheSettings(method=method, rank=4))
    moment = second_moment(normal(1, 60, 1, 32, seed=2) * torch.arange(1, 33) ** -0.5)
    span = chosen.encode(k, v, QueryStats(moment, moment, rotation), LayerState())
    basis = span.tensors["k_psac_u"][0, 0].double()
    silent = {**span.tensors, "k_psac_u": torch.zeros_like(span.tensors["k_psac_u"])}
    without = chosen.decode(replace(span, tensors=silent))[0][0, :, 0].double()
    corrected = chosen.decode(span)[0][0, :, 0].double()
    wanted = (plain_rope(k, rotation)[0, :, 0] - without) @ basis
    kept = (corrected - without) @ torch.linalg.pinv(basis.T)
    if method == "quantwm":
        flat = span.by_head()
        stored = decode_coefficients_int4(flat["k_psac_c"], flat["k_psac_c_scales"], flat["k_psac_c_factor"], 4)
        torch.testing.assert_close(kept, stored[0].double(), rtol=1e-3, atol=1e-3)
    assert (kept - wanted).norm() < 0.1 * wanted.norm()


def logit_error(k, decoded, rotation, moment) -> float:
    """Mean squared error of logits, in float64."""
    error = (decoded.double() - plain_rope(k, rotation))[0].transpose(0, 1)
    return float((error @ moment[0].double() * error).sum())


@pytest.mark.parametrize("method", ["quantwm", "quantwm-paper"])
def test_minding_the_rotation_beats_ignoring_it(method, monkeypatch):
    """Queries that care for one channel of each pair, and keys that turn fast: nothing may trust that channel."""
    tokens, width, heads = 384, 64, 2
    angles = torch.arange(tokens).unsqueeze(1) * torch.linspace(0.05, 2.5, width // 2)
    rotation = Rotation(angles.cos(), angles.sin())
    care = torch.tensor([3.0, 0.05]).repeat(width // 2) * torch.linspace(0.3, 2, width)
    moment = second_moment(normal(1, 500, heads, width, seed=5) * care)
    # The paper's own choice goes by ranges of whole groups, to which both channels of a pair belong.
    chosen = build_method(CacheSettings(method=method, rank=2, group_size=16, candidates=1, centroids=64))
    k, v = normal(1, tokens, heads, width), normal(1, tokens, heads, width, seed=9)

    def loss() -> float:
        span = chosen.encode(k, v, QueryStats(moment, moment, rotation), LayerState())
        return logit_error(k, chosen.decode(span)[0], rotation, moment)

    minded = loss()
    monkeypatch.setattr(Rotation, "seen", lambda self, metric: metric)
    assert minded < 0.92 * loss()


@pytest.mark.parametrize("method", METHODS)
def test_reading_and_attending_through_everything_that_moves_pieces(method):
    """Narrowed, cut, in blocks that stay, in spans of several blocks: always the rotated keys."""
    rotation = rope(400, 32)
    blocks = [tuple(normal(1, 40, 2, 32, seed=3 * i + j) for j in range(3)) for i in range(10)]
    settings = {"method": method, "key_bits": 8, "value_bits": 8, "span_blocks": 2}
    layer = rotated_layer(rotation, *blocks, **settings, keep_first_blocks=1, keep_recent_blocks=1)
    layer.rewind(13)
    layer.evict(25, 90)
    kept = [*range(25), *range(115, 387)]
    keys = plain_rope(torch.cat([k for k, _, _ in blocks], 1), rotation)[:, kept]
    values = torch.cat([v for _, v, _ in blocks], 1).double()[:, kept]
    got = layer.read()
    torch.testing.assert_close(got[0].double(), keys, rtol=0, atol=0.15)
    torch.testing.assert_close(got[0][:, :25].double(), keys[:, :25], rtol=1e-5, atol=1e-5)
    q, k, v = (normal(1, 9, 2, 32, seed=90 + i) for i in range(3))
    out = layer.attend(q, k, v, plain_attention)
    everything = (torch.cat((keys, k.double()), 1), torch.cat((values, v.double()), 1))
    expected = plain_attention(q.double(), *everything)
    assert (out.double() - expected).norm() < 0.05 * expected.norm()


def plain_attention(q, k, v):
    weights = (torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, v).flatten(2)


def test_layers_that_pack_together_share_one_rotation():
    """Its bytes are counted once, whatever the number of layers, blocks or head groups."""
    tokens, geometry = 24, CacheGeometry(layers=6, heads=2, head_dim=32)
    rotation = rope(2 * tokens, 32)
    for options in ({}, {"bit_overrides": "0-5.1=4"}, {"keep_recent_blocks": 1}, {"cache_device": "cpu"}):
        turned, plain = (WorldCache(CacheSettings(**options), geometry, torch.device("cpu")) for _ in range(2))
        for cache, turn in ((turned, rotation), (plain, None)):
            for block in range(2):
                part = None if turn is None else Rotation(*(t[block * tokens :][:tokens].clone() for t in turn.tensors))
                for index, layer in enumerate(cache.layers):
                    layer.append(*(normal(1, tokens, 2, 32, seed=i) for i in (0, 1, index)), rotation=part)
                    cache.commit(index)
        more = {part: turned.usage()[part] - plain.usage()[part] for part in turned.usage()}
        assert more.pop("state") == 2 * rotation.cos.nbytes
        assert not any(more.values())
        for cache in turned.layers:
            parts = cache.caches if isinstance(cache, HeadGroups) else [cache]
            for each in parts:
                found = [entry.stored.rotation.cos.data_ptr() for entry in each.entries]
                first = turned.layers[0]
                own = first.caches[0] if isinstance(first, HeadGroups) else first
                assert found == [entry.stored.rotation.cos.data_ptr() for entry in own.entries]


@pytest.mark.parametrize("options", [{"bit_overrides": "0.1=4"}, {"cache_device": "cpu"}], ids=str)
def test_head_groups_and_a_cache_on_the_cpu_read_rotated_keys(options):
    settings = CacheSettings(key_bits=8, value_bits=8, **options)
    cache, rotation = WorldCache(settings, CacheGeometry(1, 2, 32), torch.device("cpu")), rope(60, 32)
    k, v, q = (normal(1, 60, 2, 32, seed=i) for i in range(3))
    cache.layers[0].append(k, v, rotation.apply(q), lengths=(25, 35), rotation=rotation)
    cache.commit(0)
    expected = plain_rope(k, rotation)
    error = (cache.layers[0].read()[0].double() - expected).square().sum((0, 1, 3))
    assert (error < 0.15**2 * expected.square().sum((0, 1, 3))).all()
    live = (normal(1, 9, 2, 32, seed=i) for i in range(3, 6))
    out = cache.layers[0].attend(*live, plain_attention)
    assert out.shape == (1, 9, 64) and out.isfinite().all()


def test_joining_blocks_copies_nothing_twice():
    rotation = rope(30, 8)
    apart = [Rotation(*(t[a:b].clone() for t in rotation.tensors)) for a, b in ((0, 10), (10, 17), (17, 30))]
    whole = joined_rotation(apart)
    assert torch.equal(whole.cos, rotation.cos) and joined_rotation(list(apart)) is whole
    adjacent = joined_rotation([rotation.cut(slice(5, 9)), rotation.cut(slice(9, 20))])
    assert torch.equal(adjacent.sin, rotation.sin[5:20])
    assert adjacent.sin.untyped_storage().data_ptr() == rotation.sin.untyped_storage().data_ptr()
    assert joined_rotation([None, None]) is None
    with pytest.raises(ValueError, match="all before RoPE or all after"):
        joined_rotation([rotation, None])


def test_budget_packs_again_what_was_before_rope():
    geometry = CacheGeometry(layers=2, heads=2, head_dim=32)
    cache = WorldCache(CacheSettings(budget_gb=20e3 / 2**30), geometry)
    rotation = rope(200, 32)
    blocks = [tuple(normal(1, 50, 2, 32, seed=3 * i + j) for j in range(3)) for i in range(4)]
    for index, (k, v, q) in enumerate(blocks):
        for number, layer in enumerate(cache.layers):
            layer.append(k, v, q, rotation=rotation.cut(slice(50 * index, 50 * index + 50)))
            cache.commit(number)
    assert cache.record()["blocks_by_bits"].get("4/4", 0) + cache.record()["blocks_by_bits"].get("2/2", 0) > 0
    expected = plain_rope(torch.cat([k for k, _, _ in blocks], 1), rotation)
    error = (cache.layers[1].read()[0].double() - expected).norm() / expected.norm()
    assert error < 0.4


def test_mean_keys_are_those_that_queries_meet():
    layer = LayerCache(CacheSettings(), build_method(CacheSettings()))
    layer.keeps_means = True
    k, rotation = normal(1, 20, 2, 32), rope(20, 32)
    layer.append(k, k, k, rotation=rotation)
    layer.commit()
    torch.testing.assert_close(
        layer.entries[0].mean_key.double(), plain_rope(k, rotation).mean(1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("method", ["quantwm", "quantwm-paper", "rtn", "qvg"])
def test_second_order_correction_holds_under_rotation(method):
    """Averaged over noise spread evenly over each step before RoPE, exp(error of the logit - b) is 1."""
    tokens, width = 24, 32
    rotation, k = rope(tokens, width, first=3), normal(1, tokens, 1, width)
    s = CacheSettings(method=method, jensen="second-order", group_size=16, rank=2)
    chosen = build_method(s)
    moment = second_moment(normal(1, 50, 1, width, seed=4))
    span = chosen.encode(k, k, QueryStats(moment, moment, rotation), LayerState())
    q = normal(1, 5, width, seed=8) * 2
    bias = sum(key_bias(q, steps, exact=False) for steps in chosen.key_steps(span))[0].double()
    mean = torch.zeros(5, tokens, dtype=torch.double)
    for steps in chosen.key_steps(span):
        size = steps.levels[0].gather(0, steps.index[0].long().expand(-1, steps.levels.shape[-1]))
        step = size.repeat_interleave(steps.group_size, -1)[:, :width].double()
        noise = (torch.rand(4000, tokens, width, generator=torch.Generator().manual_seed(1)) - 0.5).double() * step
        met = steps.project(q)[0].double() / width**0.5
        turned = plain_rope(noise.unsqueeze(2), rotation)[:, :, 0]
        logits = torch.einsum("td,nsd->nts", met, turned)
        mean += logits.exp().mean(0).log()
    torch.testing.assert_close(bias, mean, rtol=0.1, atol=0.02)


def test_what_cannot_work_is_refused():
    check_rotation(CacheSettings(jensen="second-order"))
    check_rotation(CacheSettings(method="kivi"))
    with pytest.raises(ValueError, match="second order only; got jensen 'exact'"):
        check_rotation(CacheSettings(jensen="exact"))
    for method in ("kivi", "quarot"):
        with pytest.raises(ValueError, match=f"got method '{method}'"):
            check_rotation(CacheSettings(method=method, jensen="second-order"))
    layer = LayerCache(CacheSettings(), build_method(CacheSettings()))
    with pytest.raises(ValueError, match=r"got \[9, 16\] on cpu for keys \[1, 10, 2, 32\]"):
        layer.append(*(normal(1, 10, 2, 32),) * 3, rotation=rope(9, 32))
    with pytest.raises(ValueError, match="float32"):
        Rotation(torch.zeros(3, 4), torch.zeros(3, 4).double())


def test_a_method_that_forgets_the_rotation_is_refused(monkeypatch):
    layer = LayerCache(CacheSettings(method="rtn"), build_method(CacheSettings(method="rtn")))
    encode = type(layer.method).encode

    def forgetful(*arguments):
        return replace(encode(*arguments), rotation=None)

    monkeypatch.setattr(type(layer.method), "encode", forgetful)
    layer.append(*(normal(1, 10, 2, 32),) * 3, rotation=rope(10, 32))
    with pytest.raises(ValueError, match="method 'rtn' forgot the rotation"):
        layer.commit()


def test_spans_take_their_rotation_along(tmp_path):
    layer = rotated_layer(rope(20, 32), (normal(1, 20, 2, 32),) * 3)
    span = layer.entries[0].stored
    save_file(*(span.to_savable()[0], tmp_path / "span.safetensors", span.to_savable()[1]))
    saved = inspect_file(tmp_path / "span.safetensors")
    assert saved.bytes_by_part["rotation"] == 2 * 20 * 16 * 4 and saved.batch == 1
    again = PackedSpan.from_saved(load_file(tmp_path / "span.safetensors"), span.to_savable()[1])
    assert all(torch.equal(a, b) for a, b in zip(layer.method.decode(again), layer.method.decode(span)))
    block = RawBlock(*(normal(1, 20, 2, 32),) * 2, rotation=rope(20, 32))
    for piece in (span, block):
        assert torch.equal(piece.narrow(7).rotation.cos, rope(20, 32).cos[:7])
        assert torch.equal(piece.tail(7).rotation.cos, rope(20, 32).cos[7:])
        assert storage_bytes(piece.tail(7).rotation.tensors) == storage_bytes(piece.rotation.tensors)

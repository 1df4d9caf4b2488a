"""Bits by layer and head: the text, and caches that mix them."""

import pytest
import torch

from quantwm_core import CacheGeometry, CacheSettings, WorldCache
from quantwm_core.head_groups import HeadGroups
from quantwm_core.overrides import head_groups, parse_overrides
from quantwm_core.settings import BITS


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
    return out.transpose(1, 2).flatten(2)


def filled(settings: CacheSettings, blocks: int = 3) -> WorldCache:
    cache = WorldCache(settings, CacheGeometry(2, 4, 64))
    for block in range(blocks):
        for index, layer in enumerate(cache.layers):
            layer.append(*(normal(1, 40, 4, 64, seed=7 * block + i) for i in range(3)))
            cache.commit(index)
    return cache


def test_text_names_layers_heads_ranges_and_both_sides():
    overrides = parse_overrides(" 2.0=16, 5 = 4\n0-1.2-3=8/2;", BITS)
    assert [(o.layers, o.heads, o.bits) for o in overrides] == [
        (range(2, 3), range(1), (16, 16)),
        (range(5, 6), None, (4, 4)),
        (range(2), range(2, 4), (8, 2)),
    ]
    assert head_groups(overrides, (2, 2), 1, 4) == {(2, 2): [0, 1], (8, 2): [2, 3]}
    assert head_groups(overrides, (2, 2), 5, 4) == {(4, 4): [0, 1, 2, 3]}
    assert parse_overrides("", BITS) == ()


def test_later_entries_win():
    assert head_groups(parse_overrides("1=4, 1.0=16", BITS), (2, 2), 1, 2) == {(16, 16): [0], (4, 4): [1]}
    assert head_groups(parse_overrides("1.0=16, 1=4", BITS), (2, 2), 1, 2) == {(4, 4): [0, 1]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2.0", r"must look like .*got '2.0'. Write for example"),
        ("2:4", "must look like"),
        ("x=4", "must look like"),
        ("2=3", r"must be one of 2, 4, 8, 16; got 3 in '2=3'"),
        ("2=4/5", "got 5 in '2=4/5'"),
        ("4-2=4", "must run upwards.*Write 2-4"),
    ],
)
def test_other_texts_are_refused_with_rule_value_and_remedy(text, message):
    with pytest.raises(ValueError, match=message):
        CacheSettings(bit_overrides=text)


@pytest.mark.parametrize(("text", "message"), [("2=4", "layers go from 0 to 1"), ("0.4=4", "heads go from 0 to 3")])
def test_layers_and_heads_that_a_model_lacks_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        WorldCache(CacheSettings(bit_overrides=text), CacheGeometry(2, 4, 64))


def test_overrides_decide_whether_anything_is_packed():
    assert CacheSettings(key_bits=16, value_bits=16, bit_overrides="0=2").compresses
    assert not CacheSettings(key_bits=16, value_bits=16, bit_overrides="0=16").compresses
    assert not CacheSettings(method="off", bit_overrides="0=2").compresses


@pytest.mark.parametrize("method", ["quantwm", "quantwm-paper", "rtn", "kivi", "qvg", "quarot"])
def test_heads_are_stored_as_if_each_group_were_alone(method):
    """Every head decodes to what a cache in its bits makes of it; 16 bits are exact; bytes are those of the groups."""
    mixed = filled(CacheSettings(method=method, bit_overrides="0.1=16, 0.3=4/2, 1=8"))
    two, four, eight = (
        filled(CacheSettings(method=method, key_bits=b[0], value_bits=b[1])) for b in ((2, 2), (4, 2), (8, 8))
    )
    layer = mixed.layers[0]
    assert isinstance(layer, HeadGroups) and layer.end == layer.committed == layer.tokens == 120
    keys, values = layer.read()
    raw = torch.cat([normal(1, 40, 4, 64, seed=7 * block) for block in range(3)], dim=1)
    assert torch.equal(keys[:, :, 1], raw[:, :, 1])
    for head, alike in ((0, two), (2, two), (3, four)):
        for got, expected in zip((keys, values), alike.layers[0].read()):
            torch.testing.assert_close(got[:, :, head], expected[:, :, head], rtol=1e-4, atol=1e-4)
    assert torch.equal(mixed.layers[1].read()[0], eight.layers[1].read()[0])
    record = mixed.record()
    assert record["bytes_packed"] + record["bytes_unpacked"] + record["bytes_state"] == sum(mixed.usage().values())
    assert record["bytes_unpacked"] >= 2 * 120 * 64 * 4 and record["tokens"] == 120
    if method == "rtn":  # the codes of heads 0 and 2 in 2 bits, of head 3 in 4 and 2, and of layer 1 in 8
        assert record["bytes_by_part"]["codes"] == 120 * 64 * (2 * (2 + 2) + (4 + 2) + 4 * (8 + 8)) // 8


def test_attention_over_groups_equals_attention_over_what_they_decode_to():
    layer = filled(CacheSettings(bit_overrides="0.0=4, 0.2=16")).layers[0]
    q, k, v = (normal(1, 9, 4, 64, seed=50 + i) for i in range(3))
    expected = attention(q, *layer.read(k, v))
    torch.testing.assert_close(layer.attend(q, k, v, attention), expected, rtol=1e-5, atol=1e-5)


def test_groups_rewind_and_retire_together():
    cache = filled(CacheSettings(method="rtn", bit_overrides="0.0=16"), blocks=4)
    layer = cache.layers[0]
    whole = layer.read()[0]
    layer.rewind(20)
    layer.retire([0], torch.device("cpu"))
    layer.retire([1])
    torch.testing.assert_close(layer.read()[0], whole[:, 80:140], rtol=0, atol=1e-6)
    layer.recall([0])
    torch.testing.assert_close(layer.read()[0][:, :40], whole[:, :40], rtol=0, atol=1e-6)
    layer.recall([])
    layer.forget([0])
    assert layer.tokens == layer.end == 60 and layer.blocks == 4

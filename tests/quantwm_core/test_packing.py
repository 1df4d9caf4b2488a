"""Layers that pack together get what they would get alone, and are billed what they really hold."""

import gc
import weakref

import pytest
import torch

from quantwm_core import CacheGeometry, CacheSettings, LayerCache, WorldCache
from quantwm_core.layer_cache import PackedSpan, RawBlock
from quantwm_core.methods import build_method
from quantwm_core.packing import GROUP_BYTES, layers_together

METHODS = ("quantwm", "quantwm-paper", "rtn", "kivi", "qvg", "qvg-pro", "quarot")
LAYERS, HEADS, WIDTH, TOKENS = 3, 2, 48, 150


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def metric(layer: int):
    mixing = normal(HEADS, WIDTH, WIDTH, seed=100 + layer)
    return lambda: mixing @ mixing.transpose(1, 2)


def block(layer: int, index: int, batch: int = 1) -> list[torch.Tensor]:
    return [normal(batch, TOKENS, HEADS, WIDTH, seed=10 * layer + index + 1000 * side) for side in range(3)]


def world(batch: int = 1, **settings) -> WorldCache:
    geometry = CacheGeometry(LAYERS, HEADS, WIDTH, batch)
    return WorldCache(CacheSettings(**settings), geometry, None, [metric(i) for i in range(LAYERS)])


def add_block(cache: WorldCache, index: int, batch: int = 1, layers: int = LAYERS) -> None:
    for i in range(layers):
        cache.layers[i].append(*block(i, index, batch))
        cache.commit(i)


def held_bytes(cache: WorldCache) -> int:
    """Bytes of all storages that the cache refers to."""
    tensors = [t for layer in cache.layers for t in layer.state.tensors()]
    for piece in (entry.stored for layer in cache.layers for entry in (*layer.entries, *layer.bank)):
        tensors += piece.tensors.values() if isinstance(piece, PackedSpan) else [piece.k, piece.v, piece.moment]
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [1, 2])
def test_each_layer_gets_what_it_would_get_alone(method, batch):
    cache = world(batch, method=method)
    alone = []
    for i in range(LAYERS):
        settings = CacheSettings(method=method)
        alone.append(LayerCache(settings, build_method(settings), metric(i)))
    for index in range(3):
        add_block(cache, index, batch)
        for i in range(LAYERS):
            alone[i].append(*block(i, index, batch))
            alone[i].commit()
    for together, single in zip(cache.layers, alone, strict=True):
        for found, expected in zip(together.read(), single.read(), strict=True):
            # A sum taken in another order can move a value to the next code.
            assert (found - expected).abs().gt(1e-3).float().mean() < 0.01
        assert together.pack_events == single.pack_events > 0
        if batch == 1:
            assert together.usage() == single.usage()


@pytest.mark.parametrize("method", METHODS)
def test_the_bill_is_the_storages(method):
    cache = world(method=method)
    for index in range(3):
        add_block(cache, index)
    assert sum(cache.usage().values()) == held_bytes(cache)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", [(2, 2), (16, 2), (2, 16)])
def test_rewinding_a_part_of_a_span_frees_it(method, bits):
    cache = world(method=method, key_bits=bits[0], value_bits=bits[1])
    add_block(cache, 0)
    before = [layer.read() for layer in cache.layers]
    for layer in cache.layers:
        layer.rewind(TOKENS - 20)
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        left = layer.read()
        torch.testing.assert_close(left[0], keys[:, :20], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(left[1], values[:, :20], rtol=1e-5, atol=1e-5)
    assert sum(cache.usage().values()) == held_bytes(cache)
    for layer in cache.layers:
        layer.rewind(20)
    assert not sum(cache.usage().values())
    add_block(cache, 1)
    assert all(layer.committed == TOKENS for layer in cache.layers)


def test_an_interrupted_group_stays_readable():
    cache = world()
    add_block(cache, 0)
    add_block(cache, 1, layers=2)
    stored = [[type(entry.stored) for entry in layer.entries] for layer in cache.layers]
    assert stored == [[PackedSpan, RawBlock]] * 2 + [[PackedSpan]]
    assert cache.record()["tokens"] == TOKENS
    keys, values = cache.layers[0].read()
    assert torch.equal(keys[:, TOKENS:], block(0, 1)[0]) and torch.equal(values[:, TOKENS:], block(0, 1)[1])


def test_groups_hold_a_bounded_amount_of_full_precision():
    assert layers_together(30, 4 * 12 * 128) == 6
    assert layers_together(40, 4 * 40 * 128) == 2
    assert layers_together(30, GROUP_BYTES) == 1


@pytest.mark.parametrize("method", ["quantwm", "rtn"])
def test_blocks_leave_a_group_for_the_bank_and_are_billed_there(method):
    cache = world(method=method)
    for index in range(4):
        add_block(cache, index)
    cache.retire([0], torch.device("cpu"))
    assert sum(cache.usage().values()) == held_bytes(cache)
    for layer in cache.layers:
        assert layer.committed < 4 * TOKENS and layer.tokens == 4 * TOKENS
        assert 0 < layer.bank_bytes() < sum(layer.usage().values())
    cache.recall([0])
    assert all(layer.read()[0].shape[1] == 4 * TOKENS for layer in cache.layers)


def test_sparse_corrections_are_cut_with_their_tokens():
    """The paper's coefficients that only some tokens have stay with these tokens, from either side."""
    method = build_method(CacheSettings(method="quantwm-paper"))
    layer = LayerCache(CacheSettings(method="quantwm-paper"), method)
    k = torch.ones(1, 600, 2, 64)
    k[:, ::7] = normal(1, 86, 2, 64)
    for _ in range(2):
        layer.append(k, k, normal(1, 600, 2, 64, seed=3))
        layer.commit()
    span = layer.entries[-1].stored
    assert "k_psac_c_bitmap" in span.tensors
    keys, _ = method.decode(span)
    for start, stop in ((0, 101), (99, 600), (250, 251)):
        found, _ = method.decode(span.tail(start).narrow(stop - start))
        torch.testing.assert_close(found, keys[:, start:stop], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("span_blocks", [1, 2])
def test_the_bank_forgets_spans_of_several_blocks(span_blocks):
    cache = world(span_blocks=span_blocks)
    for index in range(4):
        add_block(cache, index)
    cache.retire([0, 1], torch.device("cpu"))
    for number in (0, 1):
        cache.forget([number])
    assert all(not layer.bank for layer in cache.layers)


def test_a_block_cut_in_two_counts_once_when_it_is_packed():
    cache = world(span_blocks=3)
    for index in range(2):
        add_block(cache, index)
    for layer in cache.layers:
        layer.evict(10, 10)
    add_block(cache, 2)
    assert all(layer.blocks == 3 and layer.pack_events == 1 for layer in cache.layers)


def test_nothing_outlives_the_cache():
    cache = world()
    add_block(cache, 0)
    kept = [weakref.ref(t) for t in cache.layers[0].state.shared.values()]
    cache.release()
    gc.disable()
    try:
        del cache
        assert not any(ref() is not None for ref in kept)
    finally:
        gc.enable()

"""A cache on the CPU is read as one on the device, whether its pieces were fetched ahead or not."""

import pytest
import torch

from quantwm_core import CacheGeometry, CacheSettings, WorldCache
from quantwm_core.prefetch import LayerFetch, piece_on
from quantwm_core.span import RawBlock

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0, device: torch.device = CPU) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
    return out.transpose(1, 2).flatten(2)


def rollout(device: torch.device, cache_device: str, overrides: str = "", ahead: bool = False) -> list[torch.Tensor]:
    """What every layer attends to over four blocks of two passes, the oldest leaving from the third on."""
    settings = CacheSettings(cache_device=cache_device, bit_overrides=overrides)
    cache = WorldCache(settings, CacheGeometry(3, 2, 64), device)
    if ahead:
        for layer, following in zip(cache.layers, cache.layers[1:] + cache.layers[:1]):
            layer.fetch_ahead(following, device, None)
    outs = []
    for block in range(4):
        for clean in (False, True):
            for index, layer in enumerate(cache.layers):
                q, k, v = (normal(1, 24, 2, 64, seed=9 * block + i, device=device) for i in range(3))
                outs.append(layer.attend(q, k, v, attention))
                if clean:
                    layer.append(k, v, q)
                    cache.commit(index)
        cache.retire([block - 2])
    return outs


@pytest.mark.parametrize("overrides", ["", "1.0=16"])
def test_fetching_ahead_changes_nothing(overrides):
    plain = rollout(CPU, "cpu", overrides)
    for got, expected in zip(rollout(CPU, "cpu", overrides, ahead=True), plain, strict=True):
        assert torch.equal(got, expected)


def test_only_what_is_still_the_same_is_used():
    fetch = LayerFetch(torch.device("meta"), None)
    pieces = [RawBlock(normal(1, 4, 1, 8), normal(1, 4, 1, 8)) for _ in range(3)]
    fetch.start(pieces[:2])
    copies = fetch._copies
    assert fetch.take(pieces[:2]) == copies and fetch._copies == []
    fetch.start(pieces[:2])
    taken = fetch.take(pieces[1:])
    assert len(taken) == 2 and all(piece.k.is_meta for piece in taken)
    assert piece_on(pieces[0], CPU) is pieces[0]


@pytest.mark.gpu
@pytest.mark.parametrize("overrides", ["", "1.0=16"])
def test_a_cache_on_the_cpu_equals_one_on_the_gpu(overrides):
    device = torch.device("cuda", torch.cuda.current_device())
    on_gpu = rollout(device, "gpu", overrides)
    for got, expected in zip(rollout(device, "cpu", overrides), on_gpu, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.gpu
def test_offloaded_spans_are_pinned():
    device = torch.device("cuda", torch.cuda.current_device())
    cache = WorldCache(CacheSettings(method="rtn", cache_device="cpu"), CacheGeometry(1, 2, 64), device)
    cache.layers[0].append(*(normal(1, 24, 2, 64, device=device),) * 3)
    cache.commit(0)
    assert all(t.is_pinned() for t in cache.layers[0].entries[0].stored.tensors.values())

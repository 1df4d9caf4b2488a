"""Packing beside the caller's stream gives the bits of packing in place, whatever memory is reused meanwhile."""

import pytest
import torch

import quantwm_core
import quantwm_core.packing
from benchmarks.bare_pack import bare_module
from quantwm_core.side_stream import SideStream

LAYERS, HEADS, WIDTH = 6, 4, 64


def normal(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(torch.bfloat16)


def rollout(core, device: torch.device, blocks: int = 5, tokens: int = 301) -> list[torch.Tensor]:
    """What every layer attends to before each block, and what can be read at the end."""
    made = []

    def metric() -> torch.Tensor:
        x = normal(HEADS, WIDTH, WIDTH, seed=7, device=device).float()
        return x @ x.transpose(1, 2)

    cache = core.WorldCache(
        core.CacheSettings(), core.CacheGeometry(LAYERS, HEADS, WIDTH, 1), device, [metric] * LAYERS
    )
    for block in range(blocks):
        for clean in (False, True):
            for index, layer in enumerate(cache.layers):
                seed = 100 * block + 10 * clean + index
                q, k, v = (normal(1, tokens, HEADS, WIDTH, seed=3 * seed + i, device=device) for i in range(3))
                made.append(layer.attend(q, k, v, attention))
                if clean:
                    layer.append(k, v, q)
                    cache.commit(index)
                else:
                    layer.observe(q)
                # What was freed is written over at once.
                del q, k, v
                torch.full((3, 1, tokens, HEADS, WIDTH), torch.nan, dtype=torch.bfloat16, device=device)
        if block == 2:
            for layer in cache.layers:
                layer.rewind(tokens // 2)
    made += [t for layer in cache.layers for t in layer.read()]
    return made


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.gpu
@pytest.mark.parametrize("with_kernels", [False, True])
def test_the_same_bits_as_in_place(with_kernels, monkeypatch):
    core, packing = quantwm_core, quantwm_core.packing
    if with_kernels:
        pytest.importorskip("triton")
        bare_module("kernels")
        core, packing = bare_module("quantwm_core"), bare_module("quantwm_core.packing")
    device = torch.device("cuda")
    # What the first run measures to choose its ways is no part of the comparison.
    rollout(core, device)
    beside = rollout(core, device)
    monkeypatch.setattr(packing, "SideStream", lambda device: SideStream(None))
    in_place = rollout(core, device)
    assert len(beside) == len(in_place) > 60
    assert all(torch.equal(a, b) for a, b in zip(beside, in_place))


def test_in_place_without_streams():
    side = SideStream(torch.device("cpu"))
    with side.work([torch.ones(2)]):
        made = side.on_callers(lambda: torch.arange(3))
    side.join()
    assert made.tolist() == [0, 1, 2]


def test_rollout_on_the_cpu_is_repeatable():
    device = torch.device("cpu")
    first, second = (rollout(quantwm_core, device, blocks=2, tokens=37) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second)) and first[-1].isfinite().all()

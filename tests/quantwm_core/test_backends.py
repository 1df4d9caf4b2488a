"""Backends are chosen by declared constraints, and say why."""

from __future__ import annotations

import logging

import pytest
import torch

from quantwm_core import CacheGeometry, CacheSettings, LayerCache, WorldCache, backends
from quantwm_core.methods import build_method

FACTS = {"device": "cuda", "capability": (9, 0), "head_dim": 128}


@pytest.fixture
def registry(monkeypatch):
    """A registry of its own with one operation, `double`, and its eager twin."""
    for name in ("_implementations", "_unavailable", "_failed"):
        monkeypatch.setattr(backends, name, {})

    @backends.eager
    def double(x):
        return 2 * x

    return backends


def add_kernel(registry, run=lambda x: x + x, **options):
    constraints = {"device": registry.OneOf(("cuda",)), "capability": registry.Between((8, 0))}
    constraints |= {"head_dim": registry.Between(16, 256)}
    return registry.register("double", "triton", constraints, failures=(RuntimeError,), **options)(run)


def test_the_kernel_is_taken_where_its_constraints_hold(registry):
    add_kernel(registry)
    assert registry.choose("double", "auto", FACTS).implementation.backend == "triton"
    assert registry.choose("double", "torch", FACTS).implementation.backend == "torch"


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        ({"device": "cpu"}, "triton: device is cpu, not cuda"),
        ({"capability": (7, 5)}, "triton: capability is (7, 5), below (8, 0)"),
        ({"head_dim": 512}, "triton: head_dim is 512, above 256"),
    ],
)
def test_each_refusal_has_a_reason(registry, fact, reason):
    add_kernel(registry)
    choice = registry.choose("double", "auto", FACTS | fact)
    assert choice.implementation.backend == "torch" and choice.reasons == (reason,)
    with pytest.raises(ValueError, match="cannot do double here .*Set backend to auto"):
        registry.choose("double", "triton", FACTS | fact, required=True)


def test_unknown_facts_refuse_nothing(registry):
    add_kernel(registry)
    assert registry.choose("double", "triton", {}, required=True).implementation.backend == "triton"


def test_a_backend_that_is_not_there_says_so(registry):
    registry.mark_unavailable("triton", "Triton is not installed")
    assert registry.choose("double", "auto", FACTS).reasons == ("triton: Triton is not installed",)
    with pytest.raises(ValueError, match="Triton is not installed"):
        registry.choose("double", "triton", FACTS, required=True)


def test_a_kernel_that_fails_to_launch_is_left_once_and_nothing_is_lost(registry, caplog):
    calls = []

    def broken(x):
        calls.append(x)
        raise RuntimeError("no such instruction")

    add_kernel(registry, broken)
    with caplog.at_level(logging.WARNING):
        for setting in ("auto", "triton"):
            assert registry.Dispatcher(setting).run("double", FACTS | {"tokens": len(calls)}, 4) == 8
    assert len(calls) == 1
    assert len(caplog.records) == 1 and "no such instruction" in caplog.text


def test_running_out_of_memory_is_left_to_the_host(registry):
    def greedy(x):
        raise torch.OutOfMemoryError("full")

    add_kernel(registry, greedy)
    with pytest.raises(torch.OutOfMemoryError):
        registry.Dispatcher().run("double", FACTS, 4)


def test_only_eager_measures_what_a_kernel_brings(registry):
    add_kernel(registry)
    with registry.only_eager("double"):
        choice = registry.choose("double", "auto", FACTS)
        assert choice.implementation.backend == "torch" and choice.reasons == ("triton: switched off",)
    assert registry.choose("double", "auto", FACTS).implementation.backend == "triton"


def test_the_summary_tells_what_ran_and_why(registry):
    add_kernel(registry, explain=lambda facts: f"for {facts['head_dim']} channels")
    dispatcher = registry.Dispatcher()
    dispatcher.run("double", FACTS, 4)
    assert dispatcher.summary() == ("triton", "double triton (for 128 channels)")
    dispatcher.run("double", FACTS | {"device": "cpu"}, 4)
    assert dispatcher.summary() == ("torch", "double torch (triton: device is cpu, not cuda)")


def test_a_run_records_its_backend():
    cache = WorldCache(CacheSettings(), CacheGeometry(1, 2, 32), torch.device("cpu"))
    q, k, v = torch.randn(3, 1, 40, 2, 32)
    cache.layers[0].append(k, v, q)
    cache.commit(0)
    record = cache.record()
    assert record["backend"] == "torch" and "encode_span torch" in record["backend_reason"]


def test_a_backend_asked_for_by_name_must_be_able_to_read_the_cache():
    with pytest.raises(ValueError, match="backend 'triton' cannot do decode_layer here"):
        WorldCache(CacheSettings(backend="triton"), CacheGeometry(1, 2, 32), torch.device("cpu"))


def host_attention(q, k, v):
    plain = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*plain).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("jensen", ["off", "exact", "second-order"])
def test_a_compiled_model_attends_through_the_cache(jensen):
    """In one graph where attention is the host's, and with the same bits."""
    settings = CacheSettings(method="rtn", jensen=jensen)
    layer = LayerCache(settings, build_method(settings))
    q, k, v = torch.randn(3, 1, 40, 2, 32)
    layer.append(k, v, q)
    layer.commit()

    def forward(q, k, v):
        return layer.attend(q * 1.0, k, v, host_attention) + 1

    compiled = torch.compile(forward, backend="aot_eager", fullgraph=jensen == "off")
    assert torch.equal(compiled(q, k, v), forward(q, k, v))
    torch.compiler.reset()


@pytest.mark.parametrize("method", ["quantwm", "quantwm-paper"])
def test_a_compiled_model_packs_what_an_uncompiled_one_packs(method):
    """Through four blocks: what the graph knows of the first block is not taken for the next."""
    settings = CacheSettings(method=method)
    results = []
    for compiled in (False, True):
        layer = LayerCache(settings, build_method(settings))

        def block(q, k, v, layer=layer):
            out = layer.attend(q * 1.0, k, v, host_attention)
            layer.append(k * 1.0, v, q)
            layer.commit()
            return out + 1

        run = torch.compile(block, backend="aot_eager") if compiled else block
        generator = torch.Generator().manual_seed(0)
        results.append([run(*torch.randn(3, 1, tokens, 2, 32, generator=generator)) for tokens in (40, 33, 40, 21)])
        results[-1] += layer.read()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch.compiler.reset()

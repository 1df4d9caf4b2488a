"""Inside torch.compile: kernels are operators of a graph, and give the same bits as outside of it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bare_pack import bare_module
from support.kernels import INTERPRETED

DTYPE = torch.float16
# Whether a gradient could be taken is no question here.
CHECKS = ("test_schema", "test_faketensor")


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Nothing compiled for one test serves another."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def whole_graph(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def drawn(device, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, DTYPE)


def attention(*qkv):
    """A host's attention function."""
    plain = (t.transpose(1, 2) for t in qkv)
    return torch.nn.functional.scaled_dot_product_attention(*plain).transpose(1, 2).flatten(2)


def test_second_moment(device):
    statistics = bare_module("kernels.statistics")
    q = drawn(device, 2, 21, 2, 48)
    torch.library.opcheck(statistics._moment_of, (q,), test_utils=CHECKS)
    torch.library.opcheck(statistics._add_moment, (q, statistics.second_moment(q)), test_utils=CHECKS)

    def twice(q):
        return statistics.second_moment(2 * q, statistics.second_moment(q))

    assert torch.equal(whole_graph(twice)(q), twice(q))


@pytest.mark.parametrize("form", ["off", "second-order", "exact"])
def test_packed_attention(pack, make_layer, device, form):
    layer = make_layer([20, 33], head_dim=48, dtype=DTYPE, jensen=form, rotated=form != "exact")
    pieces = [entry.stored for entry in layer.entries]
    table, q = pack.tables.piece_table(pieces, device), drawn(device, 1, 17, 2, 48)
    live = pack.span.RawBlock(*drawn(device, 2, 1, 5, 2, 48))
    costs = pack.attention.exact_costs(pieces, q, layer.method) if form == "exact" else None
    numbers = [("off", "second-order", "exact").index(form), table.aligned, *table.format.numbers()]
    arguments = (table.rows, table.tiles, q, live.k, live.v, costs, numbers)
    torch.library.opcheck(pack.attention.attend_tables, arguments, test_utils=CHECKS)

    def attend(q, costs):
        return pack.attention.attend_spans(table, live, q * 1.0, form, costs) + 1

    assert torch.equal(whole_graph(attend)(q, costs), attend(q, costs))


def test_decoding(pack, make_layer, device):
    layer = make_layer([20, 33], head_dim=48, dtype=DTYPE)
    table = pack.tables.piece_table([entry.stored for entry in layer.entries], device)
    live = pack.span.RawBlock(*drawn(device, 2, 1, 5, 2, 48))

    def decode(k, v):
        keys, values = torch.empty(2, 1, 58, 2, 48, dtype=DTYPE, device=device)
        pack.decode.launch_decode(table, pack.span.RawBlock(k * 1.0, v), keys, values)
        return keys + 1, values

    for actual, expected in zip(whole_graph(decode)(live.k, live.v), decode(live.k, live.v)):
        assert torch.equal(actual, expected)


@pytest.fixture
def on_kernels(pack, device, monkeypatch):
    """The interpreter stands in for a GPU where kernels are chosen."""
    if INTERPRETED:
        monkeypatch.setattr(pack.backends, "device_facts", lambda device: {"device": "cuda", "capability": (9, 0)})
        pack.backends._facts_of.cache_clear()
    yield
    pack.backends._facts_of.cache_clear()


def test_a_layer_attends_appends_and_packs(pack, on_kernels, device):
    """A compiled model's blocks, with graph breaks where addresses are asked for, as uncompiled ones."""
    settings = pack.settings.CacheSettings()
    metric = torch.eye(32, device=device).unsqueeze(0)
    results = []
    for compiled in (False, True):
        layer = pack.layer_cache.LayerCache(settings, pack.methods.build_method(settings), lambda: metric, device)

        def block(q, k, v, layer=layer):
            out = layer.attend(q * 1.0, k, v, attention)
            layer.append(k * 1.0, v * 1.0, q)
            layer.commit()
            return out + 1

        run = torch.compile(block, backend="aot_eager") if compiled else block
        with pack.backends.only_eager("attend_packed"):
            outs = [run(*drawn(device, 3, 1, tokens, 1, 32, seed=tokens)) for tokens in (20, 13)]
        results.append((outs, layer.read()))
        assert layer._backend._last["encode_span"][0].implementation.backend == "triton"
        assert layer._backend._last["decode_layer"][0].implementation.backend == "triton"
    for actual, expected in zip(results[1][0] + list(results[1][1]), results[0][0] + list(results[0][1])):
        assert torch.equal(actual, expected)

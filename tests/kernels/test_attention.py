"""Attention on packed keys and values, and in parts, against attention on decoded ones."""

from __future__ import annotations

import pytest
import torch

from support.kernels import INTERPRETED

DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]


def reference(layer, queries, live):
    """Float32 attention on what the cache reads."""
    keys, values = layer.read(live.k, live.v)
    plain = (t.transpose(1, 2).float() for t in (queries, keys, values))
    return torch.nn.functional.scaled_dot_product_attention(*plain).transpose(1, 2)


def attention(*qkv):
    """A host's attention function."""
    plain = (t.transpose(1, 2) for t in qkv)
    return torch.nn.functional.scaled_dot_product_attention(*plain).transpose(1, 2).flatten(2)


def problem(pack, layer, queries, live_tokens=5):
    """A table of the layer's pieces, a live block, and queries `[B, T, H, D]`."""
    span = next(entry.stored for entry in layer.entries if isinstance(entry.stored, pack.span.PackedSpan))
    device = next(iter(span.tensors.values())).device
    shape = (span.batch, span.heads, span.head_dim)
    live = pack.span.RawBlock(*torch.randn(2, shape[0], live_tokens, *shape[1:], device=device).to(span.dtype))
    q = torch.randn(shape[0], queries, *shape[1:], device=device).to(span.dtype)
    return pack.tables.piece_table([entry.stored for entry in layer.entries], device), live, q


def assert_close(actual, expected, dtype):
    error = (actual.float() - expected).norm() / expected.norm()
    assert actual.isfinite().all() and error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("head_dim", [48, 64, 80, 128, 256])
def test_head_widths(pack, make_layer, head_dim):
    dtype = DTYPES[0]
    layer = make_layer([20, 70, 7], heads=1, head_dim=head_dim, dtype=dtype)
    table, live, q = problem(pack, layer, queries=19)
    assert_close(pack.attention.attend_spans(table, live, q), reference(layer, q, live), dtype)


@pytest.mark.parametrize("head_dim", [48, 80, 128])
def test_keys_that_come_before_rope(pack, make_layer, head_dim):
    dtype, shape = DTYPES[0], {"heads": 1, "head_dim": head_dim, "dtype": DTYPES[0], "keep_recent_blocks": 1}
    layer = make_layer([20, 70, 7], rotated=True, **shape)
    layer.entries += make_layer([33, 12], **shape).entries
    table, live, q = problem(pack, layer, queries=19)
    assert_close(pack.attention.attend_spans(table, live, q), reference(layer, q, live), dtype)


@pytest.mark.parametrize("bits", [(2, 2), (4, 2), (2, 8)], ids=str)
def test_bits_and_batch(pack, make_layer, bits):
    layer = make_layer([33, 18], batch=2, dtype=DTYPES[0], key_bits=bits[0], value_bits=bits[1])
    table, live, q = problem(pack, layer, queries=33)
    assert_close(pack.attention.attend_spans(table, live, q), reference(layer, q, live), DTYPES[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types_and_more_than_one_chunk(pack, make_layer, dtype):
    layer = make_layer([pack.tables.CHUNK + 40], heads=1, dtype=dtype)
    table, live, q = problem(pack, layer, queries=130)
    assert_close(pack.attention.attend_spans(table, live, q), reference(layer, q, live), dtype)


def test_blocks_in_full_precision_join_the_same_softmax(pack, make_layer):
    layer = make_layer([20, 33, 15, 9], dtype=DTYPES[0], keep_first_blocks=1, keep_recent_blocks=1)
    table, live, q = problem(pack, layer, queries=17)
    assert_close(pack.attention.attend_spans(table, live, q), reference(layer, q, live), DTYPES[0])


def test_channels_of_the_live_block_that_lie_apart(pack, make_layer):
    layer = make_layer([20], dtype=DTYPES[0])
    table, live, q = problem(pack, layer, queries=17)
    apart = pack.span.RawBlock(*(x.transpose(2, 3).contiguous().transpose(2, 3) for x in (live.k, live.v)))
    assert apart.k.stride(-1) > 1
    assert torch.equal(pack.attention.attend_spans(table, apart, q), pack.attention.attend_spans(table, live, q))


def test_huge_logits_stay_finite(pack, make_layer):
    layer = make_layer([40], dtype=torch.float32 if INTERPRETED else torch.bfloat16, keys=lambda k: k * 100)
    table, live, q = problem(pack, layer, queries=17)
    assert pack.attention.attend_spans(table, live, q * 100).isfinite().all()


def test_parts_merge_to_the_whole(pack, make_layer, monkeypatch):
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    layer = make_layer([pack.tables.CHUNK * 2 + 9, 20], heads=1, dtype=dtype)
    table, live, q = problem(pack, layer, queries=17)
    monkeypatch.setattr(pack.reading, "PART_BYTES", 1)
    assert_close(pack.reading.attend_parts([table], live, q), reference(layer, q, live), dtype)


@pytest.mark.parametrize("form", ["second-order", "exact"])
@pytest.mark.parametrize("shape", [(48, 64), (80, 32), (128, 64), (256, 128)], ids=str)
def test_corrected_logits(pack, make_layer, form, shape):
    """Against the eager twin; steps are large, so that the correction matters."""
    dtype = DTYPES[0]
    options = {"heads": 1, "head_dim": shape[0], "group_size": shape[1], "dtype": dtype, "jensen": form}
    layer = make_layer([20, 70, 7], keys=lambda k: k * 3, keep_recent_blocks=1, **options)
    table, live, q = problem(pack, layer, queries=19)
    expected = layer.attend(q, live.k, live.v, attention).unflatten(2, (1, -1))
    pieces = [entry.stored for entry in layer.entries]
    costs = pack.attention.exact_costs(pieces, q, layer.method) if form == "exact" else None
    assert_close(pack.attention.attend_spans(table, live, q, form, costs), expected.float(), dtype)
    plain = pack.attention.attend_spans(table, live, q)
    assert (plain.float() - expected.float()).norm() > 0.01 * expected.float().norm()


def test_corrected_logits_of_wider_keys_and_of_keys_before_rope(pack, make_layer):
    dtype = DTYPES[0]
    for options in ({"key_bits": 4}, {"rotated": True}, {"batch": 2, "rank": 5}):
        layer = make_layer([33, 18], keys=lambda k: k * 3, dtype=dtype, jensen="second-order", **options)
        table, live, q = problem(pack, layer, queries=33)
        expected = layer.attend(q, live.k, live.v, attention).unflatten(2, (2, -1)).float()
        assert_close(pack.attention.attend_spans(table, live, q, "second-order"), expected, dtype)
    pieces = [entry.stored for entry in layer.entries]
    assert pack.reading.packed_refusal(pieces, 9, True, "exact") is None
    wide = [entry.stored for entry in make_layer([33], key_bits=4, dtype=dtype).entries]
    assert "2-bit keys only" in pack.reading.packed_refusal(wide, 9, True, "exact")


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["second-order", "exact"])
@pytest.mark.parametrize("way", ["packed", "corrected"])
def test_both_ways_correct_the_same(pack, make_layer, monkeypatch, way, form):
    layer = make_layer([300, 200], heads=4, head_dim=128, dtype=torch.bfloat16, keys=lambda k: k * 3, jensen=form)
    _, live, q = problem(pack, layer, queries=256)
    with pack.backends.only_eager("attend_packed"):
        expected = layer.attend(q, live.k, live.v, attention).float()
    monkeypatch.setattr(pack.reading, "_choose_corrected", lambda *arguments: (way, way))
    monkeypatch.setattr(pack.reading, "_chosen", {})
    assert_close(layer.attend(q, live.k, live.v, attention), expected, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["host", "cudnn", "flash", "packed", "pieces"])
def test_every_way_reads_the_same(pack, make_layer, monkeypatch, way):
    layer = make_layer([300, 200], heads=4, head_dim=128, dtype=torch.bfloat16)
    _, live, q = problem(pack, layer, queries=257)

    monkeypatch.setattr(pack.reading, "_choose", lambda *arguments: (way, way))
    monkeypatch.setattr(pack.reading, "_chosen", {})
    out = layer.attend(q, live.k, live.v, attention)
    assert_close(out, reference(layer, q, live).flatten(2), torch.bfloat16)
    assert torch.equal(out, layer.attend(q, live.k, live.v, attention))


@pytest.mark.gpu
def test_the_choice_is_timed_once_and_told(pack, make_layer, monkeypatch):
    layer = make_layer([300, 200], heads=4, head_dim=128, dtype=torch.bfloat16)
    _, live, q = problem(pack, layer, queries=256)
    monkeypatch.setattr(pack.reading, "_chosen", {})

    for _ in range(2):
        layer.attend(q, live.k, live.v, attention)
    assert len(pack.reading._chosen) == 1
    backend, why = layer._backend.summary()
    assert backend.startswith("triton") and "256 queries on 505 keys" in why


@pytest.mark.gpu
def test_without_memory_for_a_decoded_layer(pack, make_layer, monkeypatch):
    layer = make_layer([300], heads=4, head_dim=128, dtype=torch.bfloat16)
    _, live, q = problem(pack, layer, queries=256)
    monkeypatch.setattr(pack.reading, "_chosen", {})
    monkeypatch.setattr(pack.reading, "WORKSPACE_SHARE", 0.0)
    out = layer.attend(q, live.k, live.v, None)
    assert {way for way, _ in pack.reading._chosen.values()} <= {"pieces", "packed"}
    assert_close(out, reference(layer, q, live).flatten(2), torch.bfloat16)


@pytest.mark.gpu
def test_a_compiled_model_keeps_working(pack, make_layer):
    layer = make_layer([300], heads=4, head_dim=128, dtype=torch.bfloat16)
    _, live, q = problem(pack, layer, queries=256)

    def forward(q, k, v):
        return layer.attend(q * 1.0, k, v, attention) + 1

    expected = forward(q, live.k, live.v)
    torch.testing.assert_close(torch.compile(forward)(q, live.k, live.v), expected, rtol=2e-2, atol=2e-2)


def test_a_wrong_result_is_noticed(pack):
    expected = torch.randn(1, 8, 2, 16)
    assert pack.reading._agree(expected * 1.001, expected.flatten(2))
    assert not pack.reading._agree(expected.roll(1, 1), expected)
    assert not pack.reading._agree(expected * float("nan"), expected)


@pytest.mark.parametrize(
    ("fact", "operation", "reason"),
    [
        ({"head_dim": 300}, "decode_layer", "triton: head_dim is 300, above 256"),
        ({"method": "quarot", "head_dim": 256}, "decode_layer", "triton: head_dim is 256, above 128"),
    ],
)
def test_what_kernels_do_not_know_is_left_to_pytorch(pack, fact, operation, reason):
    usual = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "head_dim": 128}
    usual |= pack.backends.settings_facts(pack.settings.CacheSettings())
    assert pack.backends.choose(operation, "auto", usual).implementation.backend == "triton"
    choice = pack.backends.choose(operation, "auto", usual | fact)
    assert choice.implementation.backend == "torch" and reason in choice.reasons


def test_parts_of_different_bits_merge_to_the_whole(pack, make_layer, monkeypatch, device):
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    layer = make_layer([pack.tables.CHUNK + 9, 20], heads=1, dtype=dtype)
    layer.entries += make_layer([33], heads=1, dtype=dtype, key_bits=4, value_bits=8).entries
    history = [entry.stored for entry in layer.entries]
    tables = [pack.tables.piece_table(run, device) for run in pack.tables.format_runs(history)]
    assert len(tables) == 2
    live = pack.span.RawBlock(*torch.randn(2, 1, 5, 1, 64, device=device).to(dtype))
    q = torch.randn(1, 17, 1, 64, device=device).to(dtype)
    monkeypatch.setattr(pack.reading, "PART_BYTES", 1)
    assert_close(pack.reading.attend_parts(tables, live, q), reference(layer, q, live), dtype)
    assert "one width" in pack.reading.packed_refusal(history, 17, fits=True)

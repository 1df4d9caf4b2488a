"""The decode kernel against its eager twin."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.bare_pack import bare_module
from support.decoding import decode_both
from support.kernels import INTERPRETED, assert_within_one_ulp, assert_within_three_roundings

BITS = [(2, 2), (2, 4), (4, 8), (8, 2), (2, 16), (16, 2)]
OTHER_BITS = [(2, 2), (2, 8), (4, 4), (16, 4)]
# Two channels at a time; float32 is decoded one by one.
PAIRED = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("head_dim", [48, 64, 80, 128, 256])
@pytest.mark.parametrize("method", ["quantwm", "quantwm-paper", "rtn"])
def test_head_widths_in_ragged_spans(pack, make_layer, method, head_dim):
    layer = make_layer([20, 33, 7], heads=1, head_dim=head_dim, method=method)
    assert_within_one_ulp(*reversed(decode_both(pack, layer)))


@pytest.mark.parametrize("bits", BITS, ids=str)
def test_bits(pack, make_layer, bits):
    layer = make_layer([18, 35], batch=2, key_bits=bits[0], value_bits=bits[1])
    assert_within_one_ulp(*reversed(decode_both(pack, layer)))


@pytest.mark.parametrize("method", ["quantwm-paper", "rtn"])
@pytest.mark.parametrize("bits", OTHER_BITS, ids=str)
def test_bits_with_zero_points(pack, make_layer, method, bits):
    layer = make_layer([18, 35], head_dim=80, method=method, key_bits=bits[0], value_bits=bits[1])
    assert_within_one_ulp(*reversed(decode_both(pack, layer)))


@pytest.mark.parametrize("group_size", [16, 32, 128])
@pytest.mark.parametrize("method", ["quantwm", "quantwm-paper"])
def test_group_sizes(pack, make_layer, method, group_size):
    layer = make_layer([18, 35], head_dim=80, method=method, group_size=group_size)
    assert_within_one_ulp(*reversed(decode_both(pack, layer)))


@pytest.mark.parametrize("dtype", PAIRED, ids=str)
@pytest.mark.parametrize("bits", [(8, 8), (2, 8)], ids=str)
def test_eight_bits_in_half_precision(pack, make_layer, bits, dtype):
    """Too many for a sum in bfloat16, so one channel at a time."""
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter rounds to bfloat16 by cutting off")
    layer = make_layer([40], key_bits=bits[0], value_bits=bits[1], dtype=dtype)
    assert_within_one_ulp(*reversed(decode_both(pack, layer)))


@pytest.mark.parametrize("dtype", PAIRED, ids=str)
@pytest.mark.parametrize("head_dim", [32, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("rotated", [False, True], ids=["as they are", "before RoPE"])
def test_two_channels_at_a_time(pack, make_layer, head_dim, rotated, dtype):
    blocks = [20, 33, pack.tables.CHUNK + 9]
    layer = make_layer(blocks, heads=1, head_dim=head_dim, dtype=dtype, rotated=rotated)
    assert_within_three_roundings(*reversed(decode_both(pack, layer)))


def test_keys_that_float16_just_holds(pack, make_layer):
    """Corrections of keys as large as these are, too, though not the unit of a row."""
    layer = make_layer([40], dtype=torch.float16, keys=lambda k: (15000 * k).clamp(-60000, 60000))
    assert_within_three_roundings(*reversed(decode_both(pack, layer)))


def test_values_in_parts_of_a_chunk(pack, make_layer, monkeypatch):
    """As whole chunks or in parts, with blocks in full precision, stored and live, of any length."""
    chunk = pack.tables.CHUNK
    layer = make_layer([chunk // 4 + 1, chunk, 21], batch=2, head_dim=32, dtype=torch.bfloat16, keep_recent_blocks=1)
    pieces = [entry.stored for entry in layer.entries]
    live = torch.randn(2, 2, chunk + 40, 2, 32, device=pieces[-1].k.device).bfloat16()
    pieces.append(pack.span.RawBlock(*live))
    results = {}
    for programs in (1, 2 * 20, 4 * 20):
        monkeypatch.setattr(pack.decode, "PROGRAMS", programs)
        out = torch.full((2, 2, sum(piece.tokens for piece in pieces), 2, 32), float("nan")).to(live)
        pack.decode.decode_layer(layer.method, pieces, *out)
        results[pack.decode.value_parts(20)] = out
    assert list(results) == [1, 2, 4] and results[1].isfinite().all()
    assert torch.equal(results[1], results[2]) and torch.equal(results[1], results[4])
    assert torch.equal(results[1][:, :, -live.shape[2] :], live)


@pytest.mark.parametrize("bits", [(2, 4), (4, 2), (2, 16), (16, 4)], ids=str)
def test_bits_two_channels_at_a_time(pack, make_layer, bits):
    layer = make_layer([18, 35], batch=2, key_bits=bits[0], value_bits=bits[1], dtype=torch.bfloat16)
    assert_within_three_roundings(*reversed(decode_both(pack, layer)))


@pytest.mark.parametrize(("group_size", "rank"), [(16, 16), (32, 5), (128, 40)])
def test_forms_two_channels_at_a_time(pack, make_layer, group_size, rank):
    shape = {"head_dim": 96, "group_size": group_size, "rank": rank, "dtype": torch.bfloat16}
    layer = make_layer([18, 35], **shape)
    assert_within_three_roundings(*reversed(decode_both(pack, layer)))


@pytest.mark.parametrize("rank", [1, 5, 16, 40])
def test_ranks(pack, make_layer, rank):
    layer = make_layer([18, 35], rank=rank)
    assert_within_one_ulp(*reversed(decode_both(pack, layer)))


def test_sparse_rows_across_chunks(pack, make_layer):
    """Keys whose error is nothing but rounding of a constant gain no row, so most rows are absent."""

    def mostly_constant(k):
        k[:, 6:] = 1.0
        return k

    tokens = pack.tables.CHUNK + 100
    layer = make_layer([20, tokens], head_dim=32, method="quantwm-paper", keys=mostly_constant)
    assert "k_psac_c_bitmap" in layer.entries[1].stored.tensors
    assert_within_one_ulp(*reversed(decode_both(pack, layer)))


def test_blocks_in_full_precision_stay_bit_equal(pack, make_layer):
    layer = make_layer([20, 33, 7, 12], keep_first_blocks=1, keep_recent_blocks=1, head_dim=80)
    packed = layer.entries[1].stored
    layer.entries.insert(0, layer.entries.pop(1))
    assert layer.entries[0].stored is packed
    expected, actual = decode_both(pack, layer)
    assert_within_one_ulp(actual, expected)
    assert torch.equal(
        actual[:, :, packed.tokens : packed.tokens + 20], expected[:, :, packed.tokens : packed.tokens + 20]
    )


def test_strided_live_block(pack, make_layer):
    """Keys and values cut from one projection share its memory."""
    layer = make_layer([20])
    span = layer.entries[0].stored
    live = torch.randn(1, 9, 2, 3, 64, device=span.tensors["k_codes"].device)
    block = pack.span.RawBlock(live[..., 1, :], live[..., 2, :])
    keys, values = torch.full((2, 1, 29, 2, 64), float("nan"), device=live.device)
    pack.decode.decode_layer(layer.method, [span, block], keys, values)
    assert torch.equal(keys[:, 20:], block.k) and torch.equal(values[:, 20:], block.v)


def test_live_block_whose_channels_lie_apart(pack, make_layer):
    layer = make_layer([20])
    span = layer.entries[0].stored
    live = torch.randn(1, 9, 64, 2, device=span.tensors["k_codes"].device).transpose(2, 3)
    keys, values = torch.full((2, 1, 29, 2, 64), float("nan"), device=live.device)
    pack.decode.decode_layer(layer.method, [span, pack.span.RawBlock(live, 2 * live)], keys, values)
    assert torch.equal(keys[:, 20:], live) and torch.equal(values[:, 20:], 2 * live)


def odd_rows(shape, device):
    """Rows that begin at odd and at even elements in turn."""
    return torch.full((*shape[:-1], shape[-1] + 1), 7.0, dtype=torch.bfloat16, device=device)[..., :-1]


def odd_start(shape, device):
    return torch.full((math.prod(shape) + 1,), 7.0, dtype=torch.bfloat16, device=device)[1:].view(shape)


def by_heads(shape, device):
    """The order in which attention reads them: `[B, H, S, D]`."""
    batch, tokens, heads, width = shape[1:]
    return torch.full((2, batch, heads, tokens, width), 7.0, dtype=torch.bfloat16, device=device).transpose(2, 3)


@pytest.mark.parametrize(("layout", "in_pairs"), [(odd_rows, False), (odd_start, False), (by_heads, True)])
def test_layouts_of_the_result(pack, make_layer, device, layout, in_pairs):
    """Pairs are written as words, so they must begin at even elements; what lies between rows stays."""
    layer, shape = make_layer([5, 3], batch=2, head_dim=40, dtype=torch.bfloat16), (2, 2, 8, 2, 40)
    pieces = [entry.stored for entry in layer.entries]
    expected, actual = torch.zeros(shape, dtype=torch.bfloat16, device=device), layout(shape, device)
    pack.operations.decode_layer(layer.method, pieces, *expected)
    pack.decode.decode_layer(layer.method, pieces, *actual)
    form = pack.tables.piece_table(pieces, device).format.numbers()
    constants = pack.decode.format_constants(tuple(form[:-1]), 40, True)
    assert pack.decode.in_pairs(constants, *actual) == in_pairs
    assert_within_three_roundings(actual, expected)
    if layout is odd_rows:
        assert (actual.as_strided((2, 2, 8, 2, 41), actual.stride())[..., 40] == 7).all()


def test_results_that_lie_differently_are_refused(pack, make_layer, device):
    layer = make_layer([5])
    keys, values = torch.empty(1, 5, 2, 64, device=device), torch.empty(1, 2, 5, 64, device=device).transpose(1, 2)
    with pytest.raises(ValueError, match="same strides"):
        pack.decode.decode_layer(layer.method, [layer.entries[0].stored], keys, values)


def test_batch_slices_share_storage(pack, make_layer):
    layer = make_layer([21], batch=3, heads=1, head_dim=48)
    whole, _ = decode_both(pack, layer)
    layer.entries[0].stored = layer.entries[0].stored.batch_slice(slice(1, 3))
    expected, actual = decode_both(pack, layer)
    assert_within_one_ulp(actual, expected)
    torch.testing.assert_close(actual[:, :, :21], whole[:, 1:, :21])


def test_table_is_built_once_and_dies_with_its_pieces(pack, make_layer, device):
    layer = make_layer([20, 33], head_dim=48)
    pieces = [entry.stored for entry in layer.entries]
    table = pack.tables.piece_table(pieces, device)
    assert pack.tables.piece_table(list(pieces), device) is table
    assert pack.tables.piece_table(pieces[1:], device) is not table
    known = len(pack.tables._tables)
    del layer, pieces
    assert len(pack.tables._tables) < known


def test_nothing_stored_but_a_live_block(pack, make_layer, device):
    """Kernels are compiled for the types of an empty table as for those of any other."""
    layer = make_layer([20, 21])
    tables = [pack.tables.piece_table(each, device) for each in ([], [entry.stored for entry in layer.entries])]
    assert len({(table.rows.dtype, table.tiles.dtype, table.rows.shape[1]) for table in tables}) == 1
    block = pack.span.RawBlock(*torch.randn(2, 1, 9, 2, 64, device=device))
    result = torch.full((2, 1, 9, 2, 64), float("nan"), device=device)
    pack.decode.decode_layer(layer.method, [block], *result)
    assert torch.equal(result[0], block.k) and torch.equal(result[1], block.v)


@pytest.mark.parametrize(
    ("chunks", "of_piece"),
    [([2, 2, 2], 2), ([2, 2, 1], 2), ([3], 3), ([1, 2], 0), ([2, 1, 2], 0)],
    ids=str,
)
def test_pieces_of_one_length_need_no_list(pack, make_layer, device, chunks, of_piece):
    """All pieces but the last as many chunks: a program works out by itself where its own lies."""
    layer = make_layer([pack.tables.CHUNK * (count - 1) + 7 for count in chunks], heads=1, head_dim=32)
    assert pack.tables.piece_table([entry.stored for entry in layer.entries], device).of_piece == of_piece
    assert_within_one_ulp(*reversed(decode_both(pack, layer)))


@pytest.mark.parametrize(("tokens", "aligned"), [(32, True), (31, False)])
def test_layers_that_were_packed_together(pack, device, tokens, aligned):
    """A layer's tensors are slices of its group's; of usual sizes they can still be read in words."""
    cache, backends = bare_module("quantwm_core.cache"), pack.backends
    world = cache.WorldCache(pack.settings.CacheSettings(), cache.CacheGeometry(3, 2, 64), device)
    generator = torch.Generator().manual_seed(0)
    with backends.only_eager("encode_span", "second_moment"):
        for layer in range(3):
            q, k, v = torch.randn(3, 1, tokens, 2, 64, generator=generator).to(device)
            world.layers[layer].append(k, v, q)
            world.commit(layer)
    for layer in world.layers:
        assert_within_one_ulp(*reversed(decode_both(pack, layer)))
    second = [entry.stored for entry in world.layers[1].entries]
    assert pack.tables.piece_table(second, device).aligned == aligned


@pytest.mark.parametrize("dtype", PAIRED, ids=str)
@pytest.mark.parametrize("rank", [4, 5])
def test_where_a_span_lies_changes_nothing(pack, device, rank, dtype):
    """Slices of a group that are not aligned are decoded as copies are that come from the CPU."""
    cache = bare_module("quantwm_core.cache")
    world = cache.WorldCache(pack.settings.CacheSettings(rank=rank), cache.CacheGeometry(3, 1, 40), device)
    with pack.backends.only_eager("encode_span", "second_moment"):
        for layer in range(3):
            q, k, v = torch.randn(3, 1, 7, 1, 40, generator=torch.Generator().manual_seed(layer)).to(device, dtype)
            world.layers[layer].append(k, v, q)
            world.commit(layer)
    for layer in world.layers[1:]:
        span = layer.entries[0].stored
        copy = replace(span, tensors={name: tensor.clone() for name, tensor in span.tensors.items()})
        tables = [pack.tables.piece_table([piece], device) for piece in (span, copy)]
        assert [table.aligned for table in tables] == [False, True] and all(table.pairs for table in tables)
        results = torch.full((2, 2, 1, 7, 1, 40), float("nan"), dtype=dtype, device=device)
        for piece, result in zip((span, copy), results, strict=True):
            pack.decode.decode_layer(layer.method, [piece], *result)
        assert torch.equal(*results)


def mixed_layer(pack, make_layer, widths, **shape):
    """A layer whose blocks have different bits, a block in full precision among them."""
    layer = make_layer([40, 33], keep_recent_blocks=1, **shape)
    for keys, values in widths:
        other = make_layer([pack.tables.CHUNK + 7, 18], key_bits=keys, value_bits=values, **shape)
        layer.entries += other.entries
    return layer


@pytest.mark.parametrize("method", ["quantwm", "rtn"])
def test_spans_of_different_bits(pack, make_layer, method):
    """Each run of spans in one format is read by itself, into its part of the workspace."""
    layer = mixed_layer(pack, make_layer, [(4, 4), (2, 2), (8, 8), (8, 2)], heads=1, head_dim=48, method=method)
    pieces = [entry.stored for entry in layer.entries]
    runs = pack.tables.format_runs(pieces)
    assert [len(run) for run in runs] == [2, 2, 2, 2, 2] and sum(runs, []) == pieces
    assert_within_one_ulp(*reversed(decode_both(pack, layer)))


def test_runs_of_one_format(pack, make_layer):
    """Blocks in full precision cut no run, wherever they lie."""
    layer = make_layer([20, 33, 12], keep_first_blocks=1, keep_recent_blocks=1, head_dim=48)
    pieces = [entry.stored for entry in layer.entries]
    assert pack.tables.format_runs(pieces) == [pieces]
    assert pack.tables.format_runs(pieces[:1]) == [pieces[:1]] and pack.tables.format_runs([]) == []


@pytest.mark.parametrize("head_dim", [48, 80, 128])
@pytest.mark.parametrize("method", ["quantwm", "quantwm-paper", "rtn"])
def test_keys_that_come_before_rope(pack, make_layer, method, head_dim):
    layer = make_layer([20, 33, pack.tables.CHUNK + 9], heads=1, head_dim=head_dim, method=method, rotated=True)
    assert_within_one_ulp(*reversed(decode_both(pack, layer)))


@pytest.mark.parametrize("bits", [(2, 2), (4, 8), (16, 2)], ids=str)
def test_keys_before_and_after_rope_in_one_table(pack, make_layer, bits):
    """Also blocks in full precision, the last one too: it is no live block, whose keys are turned already."""
    shape = {"batch": 2, "key_bits": bits[0], "value_bits": bits[1], "keep_recent_blocks": 1, "dtype": torch.float16}
    layer = make_layer([18, 35, 21], rotated=True, **shape)
    layer.entries[1:1] = make_layer([19, 22], **shape).entries
    assert_within_three_roundings(*reversed(decode_both(pack, layer)))
    pieces = [entry.stored for entry in layer.entries]
    expected, actual = torch.full((2, 2, 2, 115, 2, 64), float("nan"), dtype=torch.float16, device=pieces[-1].k.device)
    pack.operations.decode_layer(layer.method, pieces, *expected)
    pack.decode.decode_layer(layer.method, pieces, *actual)
    assert_within_three_roundings(actual, expected)
    assert not torch.equal(actual[0, :, -21:], pieces[-1].k)

"""KIVI, Quant VideoGen and QuaRot against plain float64 versions written from their formulas."""

import random

import pytest
import torch

from quantwm_core import CacheSettings, LayerCache
from quantwm_core.codec.hadamard import hadamard, hadamard_rotation
from quantwm_core.layer_cache import RawBlock
from quantwm_core.methods import LayerState, build_method
from quantwm_core.query_stats import QueryStats
from quantwm_core.span import PackedSpan, storage_bytes

WIDTHS = (48, 80, 128, 256)
LENGTHS = (1, 31, 33, 70)
SCALES = {"qvg": 64, "qvg-pro": 16}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encode(k: torch.Tensor, v: torch.Tensor, method: str, bits: int, **settings) -> tuple:
    codec = build_method(CacheSettings(method, bits, bits, **settings))
    span = codec.encode(k, v, QueryStats(), LayerState())
    return *codec.decode(span), span


def minmax(x: torch.Tensor, bits: int) -> torch.Tensor:
    """KIVI's rounding of one group, as a list of float64 values."""
    low, high = x.min(), x.max()
    step = ((high - low) / (2**bits - 1)).half().double()
    low = low.half().double()
    codes = ((x - low) / step).round().clamp(0, 2**bits - 1) if step > 0 else torch.zeros_like(x)
    return low + step * codes


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("head_dim", "tokens"), zip(WIDTHS, LENGTHS))
def test_kivi_follows_its_formula(bits, head_dim, tokens):
    k, v = normal(2, tokens, 1, head_dim), normal(2, tokens, 1, head_dim, seed=1)
    keys, values, _ = encode(k, v, "kivi", bits)
    expected_k, expected_v = k.double(), v.double()
    for batch in range(2):
        for piece in expected_k[batch, :, 0].split(32):
            for channel in piece.unbind(1):
                channel.copy_(minmax(channel, bits))
        for token in expected_v[batch, :, 0].unbind():
            for piece in token.split(32):
                piece.copy_(minmax(piece, bits))
    for got, expected in ((keys, expected_k), (values, expected_v)):
        far = ((got.double() - expected).abs() > 1e-4).double().mean()
        assert far < 0.002  # ties of float32 against float64


@pytest.mark.parametrize("method", ["qvg", "qvg-pro"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("head_dim", "tokens"), zip(WIDTHS, LENGTHS))
def test_quant_videogen_follows_its_formula(method, bits, head_dim, tokens):
    x = normal(1, tokens, 1, head_dim)
    keys, values, span = encode(x, x, method, bits, centroids=5)
    residual = x[0, :, 0].double()
    books, ids = span.tensors["k_centroids"][0, 0].double(), span.tensors["k_ids"][0, 0].long()
    assert books.shape[0] == ids.shape[-1] == (1 if method == "qvg" else 4)
    for book, chosen in zip(books, ids.unbind(-1)):
        distance = (residual[:, None] - book).square().sum(-1)
        # Each token took its nearest centroid of this stage; float32 may tie where float64 does not.
        taken = distance.gather(1, chosen[:, None]).squeeze(1)
        torch.testing.assert_close(taken, distance.amin(1), rtol=1e-4, atol=1e-4)
        residual = residual - book[chosen]
    base, top = x[0, :, 0].double() - residual, 2 ** (bits - 1) - 1
    expected = torch.empty_like(residual)
    for piece, target in zip(residual.split(SCALES[method], -1), expected.split(SCALES[method], -1)):
        scale = (piece.abs().amax(-1, keepdim=True) / top).to(torch.float8_e4m3fn).double()
        target.copy_(scale * torch.where(scale > 0, piece / scale, 0.0).round().clamp(-top, top))
    far = ((keys[0, :, 0].double() - base - expected).abs() > 1e-4).double().mean()
    assert far < 0.01  # ties of float32 against float64
    assert torch.equal(keys, values)


def test_two_bits_of_quant_videogen_are_three_values():
    _, _, span = encode(normal(1, 40, 1, 64), normal(1, 40, 1, 64), "qvg", 2)
    codes = torch.stack([span.tensors["k_codes"] >> shift & 3 for shift in (0, 2, 4, 6)])
    assert codes.unique().tolist() == [0, 1, 2]


def test_a_quant_videogen_layer_of_longcat_is_67_32_mib():
    tokens, heads, head_dim = 29_640, 32, 128
    codec = build_method(CacheSettings("qvg"))
    k = normal(1, tokens, 1, head_dim).bfloat16()
    span = codec.encode(k, k, QueryStats(), LayerState())
    layer = heads * storage_bytes(span.tensors.values())
    bits = 2 + 8 / 64 + 8 / head_dim + 256 * 16 / tokens
    assert layer == round(bits * 2 * heads * tokens * head_dim / 8)
    assert round(layer / 2**20, 2) == 67.32


@pytest.mark.parametrize(("method", "bits"), [("kivi", 3.0), ("qvg", 2.1875), ("qvg-pro", 2.75)])
def test_bits_a_number_without_the_codebook(method, bits):
    _, _, span = encode(normal(1, 320, 1, 128), normal(1, 320, 1, 128), method, 2)
    stored = [t for name, t in span.tensors.items() if "centroids" not in name]
    assert 8 * storage_bytes(stored) / (2 * 320 * 128) == bits


@pytest.mark.parametrize("order", [1, 2, 4, 12, 20, 48, 80, 96, 128, 224, 256])
def test_hadamard_matrices_have_orthogonal_rows_of_signs(order):
    matrix = hadamard(order)
    assert set(matrix.unique().tolist()) <= {-1.0, 1.0}
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.double))


@pytest.mark.parametrize("width", [33, 36, 48, 80, 112, 128])
def test_rotations_are_orthonormal_at_any_width(width):
    rotation = hadamard_rotation(width)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(width), rtol=0, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("head_dim", "tokens"), zip(WIDTHS, LENGTHS))
def test_quarot_is_plain_rounding_in_rotated_coordinates(bits, head_dim, tokens):
    k, v = normal(1, tokens, 2, head_dim), normal(1, tokens, 2, head_dim, seed=1)
    keys, values, _ = encode(k, v, "quarot", bits)
    rotation = hadamard_rotation(head_dim)
    turned = encode(k @ rotation, v @ rotation, "rtn", bits)
    torch.testing.assert_close(keys, turned[0] @ rotation.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values, turned[1] @ rotation.T, rtol=1e-4, atol=1e-4)


def test_a_rotation_spreads_an_outlier_channel():
    k = normal(1, 200, 1, 128)
    k[..., 7] *= 30
    errors = {method: (encode(k, k, method, 4)[0] - k).square().mean() for method in ("rtn", "quarot")}
    assert errors["quarot"] < 0.5 * errors["rtn"]


def kivi_layer(**settings) -> LayerCache:
    s = CacheSettings("kivi", **settings)
    return LayerCache(s, build_method(s))


def stored_codes(layer: LayerCache, name: str) -> torch.Tensor:
    spans = [entry.stored for entry in layer.entries if isinstance(entry.stored, PackedSpan)]
    return torch.cat([span.tensors[name] for span in spans], dim=2) if spans else torch.empty(0)


@pytest.mark.parametrize("tokens", [24, 128, 159, 160, 400])
@pytest.mark.parametrize("piece", [1, 12, 100, 400])
def test_kivi_packs_the_same_codes_however_tokens_arrive(tokens, piece):
    """R1: groups are whole and counted from the start, never the ragged ends of what arrived together."""
    k = normal(1, tokens, 2, 64)
    whole, streamed = kivi_layer(), kivi_layer()
    whole.append(k, k)
    whole.commit()
    for part in k.split(piece, dim=1):
        streamed.append(part, part)
        streamed.commit()
    packed = max(0, (tokens - 128) // 32 * 32)
    for name in ("k_codes", "k_group_scales", "k_group_zeros", "v_codes", "v_scales", "v_zeros"):
        assert torch.equal(stored_codes(streamed, name), stored_codes(whole, name))
    assert whole.packed_elements() == streamed.packed_elements() == 2 * packed * 2 * 64
    keys, _ = streamed.read()
    assert torch.equal(keys[:, packed:], k[:, packed:])
    assert ((keys - k)[:, :packed].abs().amax((2, 3)) > 0).all()
    assert streamed.blocks == -(-tokens // piece) and streamed.end == tokens


def test_kivi_keeps_other_policies_and_counts_blocks_that_are_packed_in_two_parts():
    layer = kivi_layer(keep_first_blocks=1, keep_recent_blocks=1)
    blocks = [normal(1, 100, 1, 32, seed=i) for i in range(5)]
    for number, block in enumerate(blocks, 1):
        layer.append(block, -block)
        layer.commit()
        assert layer.blocks == number and layer.end == 100 * number
    keys, _ = layer.read()
    assert torch.equal(keys[:, :100], blocks[0]) and torch.equal(keys[:, -100:], blocks[-1])
    # 300 tokens lie between the first and the last block. The window takes 28 more, and 272 are 8 whole groups.
    assert layer.packed_elements() == 2 * 256 * 32
    assert layer.usage()["blocks"] == 2 * (500 - 256) * 32 * 4


def test_kivi_rewinds_to_what_it_was_through_any_sequence():
    """R5: nothing is left behind, the window is refilled, and what was packed keeps its values."""
    choose, layer, plain = random.Random(0), kivi_layer(), torch.empty(1, 0, 1, 32)
    for step in range(60):
        if choose.random() < 0.6:
            block = normal(1, choose.randint(1, 90), 1, 32, seed=step)
            layer.append(block, -block)
            layer.commit()
            plain = torch.cat((plain, block), dim=1)
        else:
            back = choose.randint(0, min(150, plain.shape[1]))
            layer.rewind(back)
            plain = plain[:, : plain.shape[1] - back]
        assert layer.end == plain.shape[1] and layer.blocks <= step + 1
        if not layer.end:
            continue
        keys, _ = layer.read()
        raw = [isinstance(entry.stored, RawBlock) for entry in layer.entries]
        assert raw == sorted(raw), "kept tokens follow packed ones"
        packed = layer.packed_elements() // (2 * 32)
        assert torch.equal(keys[:, packed:], plain[:, packed:])
        assert (keys - plain).abs().max() < 1.2 and (packed == 0 or (keys != plain).any())
        assert layer.usage()["blocks"] == 2 * (layer.end - packed) * 32 * 4


@pytest.mark.parametrize("kept", [1, 32, 33, 64, 69])
def test_a_narrowed_kivi_span_keeps_the_groups_of_its_tokens(kept):
    k, v = normal(2, 70, 2, 48), normal(2, 70, 2, 48, seed=1)
    keys, values, span = encode(k, v, "kivi", 2)
    short = span.narrow(kept)
    codec = build_method(CacheSettings("kivi"))
    again = codec.decode(short)
    assert torch.equal(again[0], keys[:, :kept]) and torch.equal(again[1], values[:, :kept])
    assert short.tensors["k_group_scales"].shape[2] == -(-kept // 32)


@pytest.mark.parametrize("method", ["quantwm", "quantwm-paper", "rtn", "kivi", "qvg", "qvg-pro", "quarot"])
@pytest.mark.parametrize(("key_bits", "value_bits"), [(2, 16), (16, 2)])
def test_a_side_in_full_precision_is_narrowed_along_tokens(method, key_bits, value_bits):
    k = normal(1, 40, 3, 64)
    codec = build_method(CacheSettings(method, key_bits, value_bits))
    span = codec.encode(k, k, QueryStats(), LayerState())
    for got, full in zip(codec.decode(span.narrow(17)), codec.decode(span)):
        torch.testing.assert_close(got, full[:, :17], rtol=0, atol=1e-5)

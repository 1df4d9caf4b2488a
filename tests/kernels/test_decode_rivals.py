"""The decode kernels of the methods that are compared with, against their eager twins."""

from __future__ import annotations

import pytest
import torch

from support.decoding import decode_both
from support.kernels import INTERPRETED, assert_within_one_ulp

METHODS = ["kivi", "qvg", "qvg-pro", "quarot"]
DTYPES = [torch.float16] + ([torch.float32] if INTERPRETED else [torch.bfloat16])


def assert_same(method: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Products with a matrix add up in another order; else a value may differ by its last bit."""
    if method != "quarot":
        assert_within_one_ulp(actual, expected)
        return
    error = (actual.float() - expected.float()).abs()
    ulp = torch.finfo(expected.dtype).eps * expected.float().abs()
    assert actual.isfinite().all() and (error <= ulp + 2e-5 * expected.float().abs().max()).all()


@pytest.mark.parametrize("head_dim", [48, 64, 80, 128])
@pytest.mark.parametrize("method", METHODS)
def test_head_widths_in_ragged_spans(pack, make_layer, method, head_dim):
    """Of kivi the newest 128 tokens, and what is no whole group, stay in full precision."""
    blocks = [150, 43] if method == "kivi" else [20, 33, 7]
    layer = make_layer(blocks, heads=1, head_dim=head_dim, method=method)
    assert_same(method, *reversed(decode_both(pack, layer)))


@pytest.mark.parametrize("bits", [(2, 4), (4, 8), (8, 2), (2, 16), (16, 2)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_bits_and_batch(pack, make_layer, method, bits):
    blocks = [150, 43] if method == "kivi" else [18, 35]
    layer = make_layer(blocks, batch=2, heads=1, method=method, key_bits=bits[0], value_bits=bits[1])
    assert_same(method, *reversed(decode_both(pack, layer)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_keys_that_come_before_rope_in_more_than_one_chunk(pack, make_layer, method, dtype):
    tokens = pack.tables.CHUNK + 150
    layer = make_layer([tokens, 21], heads=1, head_dim=48, method=method, rotated=True, dtype=dtype)
    assert_same(method, *reversed(decode_both(pack, layer)))


@pytest.mark.parametrize("cut", [5, 32, 70])
def test_token_groups_that_were_cut(pack, make_layer, cut):
    layer = make_layer([250], head_dim=48, heads=1, method="kivi", rotated=True)
    layer.evict(0, cut)
    layer.rewind(129)
    span = layer.entries[0].stored
    assert span.phase == cut % 32 and isinstance(span, pack.span.PackedSpan)
    assert_same("kivi", *reversed(decode_both(pack, layer)))


@pytest.mark.parametrize("factor", [0.002, 1000.0])
def test_tiny_and_large_scales_in_fp8(pack, make_layer, factor):
    """Below 2**-6 the format has no leading one; above 448 it saturates."""
    layer = make_layer([60], heads=1, head_dim=48, method="qvg", keys=lambda k: k * factor)
    scales = layer.entries[0].stored.tensors["k_scales"].float()
    assert scales.max() == 448 if factor > 1 else 0 < scales.min() < scales.max() < 2**-6
    assert_same("qvg", *reversed(decode_both(pack, layer)))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="real sizes")
@pytest.mark.parametrize("method", METHODS)
def test_real_sizes(pack, make_layer, method):
    layer = make_layer([4680, 4680], heads=12, head_dim=128, method=method, dtype=torch.bfloat16)
    assert_same(method, *reversed(decode_both(pack, layer)))

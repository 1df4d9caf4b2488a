"""The paper's bit budget, from tensors that the real encoder packed."""

import pytest
import torch

from quantwm_core import CacheGeometry, CacheSettings
from quantwm_core.methods import LayerState, build_method
from quantwm_core.query_stats import QueryStats, second_moment
from quantwm_core.span import storage_bytes


def bits_per_element(tokens: int, head_dim: int, **settings) -> float:
    """Bits per scalar of one head's span in the paper's layout."""
    generator = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(1, tokens, 1, head_dim, generator=generator) for _ in range(3))
    method = build_method(CacheSettings(method="quantwm-paper", centroids=256, **settings))
    moment = second_moment(q[:, :2000])
    span = method.encode(k, v, QueryStats(moment, moment), LayerState())
    return storage_bytes(span.tensors.values()) * 8 / (2 * tokens * head_dim)


def test_longcat_is_2_6716_bits_and_3_625_gib():
    bits = bits_per_element(29_640, 128)
    assert bits == pytest.approx(2.6716, abs=4e-4)
    bf16 = CacheGeometry(48, 32, 128).bytes_bf16(29_640)
    assert bf16 / 2**30 == pytest.approx(21.709, abs=1e-3)
    assert bf16 * bits / 16 / 2**30 == pytest.approx(3.625, abs=1e-3)


@pytest.mark.parametrize(("head_dim", "tokens", "delta"), [(256, 7_040, 0.1341), (128, 9_360, 0.2569)])
def test_doubling_the_rank_costs_what_table_9_says(head_dim, tokens, delta):
    assert bits_per_element(tokens, head_dim, rank=16) - bits_per_element(tokens, head_dim) == pytest.approx(
        delta, abs=2e-4
    )

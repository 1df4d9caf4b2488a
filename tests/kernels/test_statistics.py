"""The query statistics' kernels against their eager twins."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bare_pack import bare_module
from support.kernels import INTERPRETED


@pytest.fixture(scope="module")
def kernels(device):
    return bare_module("kernels.statistics")


@pytest.fixture(scope="module")
def core():
    return bare_module("quantwm_core.methods.quantwm")


def moments(heads: int, width: int, device: torch.device, decay: float = 1.0) -> torch.Tensor:
    """Second moments with a decaying spectrum and an offset, as queries after RoPE have."""
    generator = torch.Generator().manual_seed(width)
    basis = torch.linalg.qr(torch.randn(heads, width, width, generator=generator)).Q
    spectrum = torch.arange(1, width + 1) ** -decay
    q = torch.randn(heads, 400, width, generator=generator) * spectrum @ basis.transpose(1, 2)
    q += torch.randn(heads, 1, width, generator=generator) / width**0.5
    return (q.transpose(1, 2) @ q / 400).to(device)


def captured(moment: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Share of the trace in the span of `basis`."""
    q = torch.linalg.qr(basis.double()).Q
    inside = torch.einsum("ndr,nde,ner->n", q, moment.double(), q)
    return inside / moment.double().diagonal(dim1=1, dim2=2).sum(-1)


@pytest.mark.parametrize("shape", [(1, 150, 2, 64), (2, 64, 3, 48), (1, 13, 1, 128), (1, 70, 1, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_second_moment(kernels, core, device, shape, dtype):
    q = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    expected = bare_module("quantwm_core.query_stats").second_moment(q)
    torch.testing.assert_close(kernels.second_moment(q), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 700, 2, 80), (2, 513, 1, 64), (1, 1100, 1, 16)], ids=str)
def test_shares_of_the_tokens_are_added_to_a_total(kernels, device, shape):
    """Long enough for several programs a tile, the last of which adds."""
    q = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    expected = bare_module("quantwm_core.query_stats").second_moment(q)
    total = kernels.second_moment(q)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(total, kernels.second_moment(q))
    assert kernels.second_moment(q, total) is total
    assert torch.equal(total, 2 * kernels.second_moment(q))


def test_a_launch_that_did_not_finish_spoils_no_later_one(kernels, device, monkeypatch):
    """Programs count each other; a share that never came must not be missed again."""
    q = torch.randn(1, 700, 1, 64, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    expected, launch = kernels.second_moment(q), kernels.launch

    def without_one_share(kernel, grid, *arguments, **constants):
        launch(kernel, (grid[0] - 1, *grid[1:]), *arguments, **constants)

    with monkeypatch.context() as patched:
        patched.setattr(kernels, "launch", without_one_share)
        kernels.second_moment(q)
    assert torch.equal(kernels.second_moment(q), expected)


def test_second_moment_of_a_view(kernels, device):
    q = torch.randn(2, 90, 6, 32, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    view = q[:1, 10:, ::2]
    expected = bare_module("quantwm_core.query_stats").second_moment(view)
    torch.testing.assert_close(kernels.second_moment(view), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [48, 64, 128])
@pytest.mark.parametrize("decay", [0.5, 1.5])
def test_directions_capture_what_the_eigenvectors_do(kernels, core, device, width, decay):
    moment = moments(2, width, device, decay)
    rank = core.automatic_rank(width)
    found = kernels.leading_eigenvectors(moment, rank)
    best = captured(moment, core.leading_eigenvectors(moment, rank))
    assert found.shape == (2, width, rank) and found.dtype == torch.bfloat16
    assert (captured(moment, found) / best).min() > 0.999
    gram = found.float().transpose(1, 2) @ found.float()
    assert (gram - torch.eye(rank, device=device)).abs().max() < 0.01


def test_directions_come_with_the_largest_last(kernels, device):
    moment = torch.diag(torch.arange(64.0, 0.0, -1)).unsqueeze(0).to(device) ** 3
    largest = kernels.leading_eigenvectors(moment, 4)[0].float().abs().argmax(0)
    assert largest.tolist() == [3, 2, 1, 0]


def test_directions_of_a_single_query_are_that_one_alone(kernels, device):
    q = torch.randn(1, 64, 1, generator=torch.Generator().manual_seed(0)).to(device)
    moment = q @ q.transpose(1, 2)
    found = kernels.leading_eigenvectors(moment, 8).float()
    assert captured(moment, found[..., -1:]).item() > 0.9999
    gram = found.transpose(1, 2) @ found
    length = gram.diagonal(dim1=1, dim2=2)
    assert ((length - 1).abs() < 0.01).logical_or(length == 0).all()
    assert (gram - torch.diag_embed(length)).abs().max() < 0.01


def test_directions_of_no_queries_are_finite(kernels, device):
    assert kernels.leading_eigenvectors(torch.zeros(1, 48, 48, device=device), 6).isfinite().all()


@pytest.mark.parametrize("width", [16, 48, 80, 128])
def test_feedback_weights(kernels, core, device, width):
    moment = moments(2, width, device)
    for basis in (None, core.key_directions(moment, 4)):
        expected = core.key_feedback(moment, basis, core.QueryStats()).float()
        torch.testing.assert_close(kernels.feedback_weights(moment, basis).float(), expected, rtol=0.01, atol=2e-3)


def test_feedback_of_a_zero_metric_is_none(kernels, device):
    assert (kernels.feedback_weights(torch.zeros(1, 32, 32, device=device)) == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="real sizes")
def test_real_sizes_are_the_same_to_the_bit_each_time(kernels, core, device):
    q = torch.randn(1, 4680, 12, 128, device=device).bfloat16()
    moment = kernels.second_moment(q)
    expected = bare_module("quantwm_core.query_stats").second_moment(q)
    torch.testing.assert_close(moment, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(moment, kernels.second_moment(q))
    metric = moments(12, 128, device)
    basis = kernels.leading_eigenvectors(metric, 16)
    assert torch.equal(basis, kernels.leading_eigenvectors(metric, 16))
    assert torch.equal(kernels.feedback_weights(metric, basis), kernels.feedback_weights(metric, basis))

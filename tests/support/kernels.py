"""How kernel tests compare, and where they run."""

from __future__ import annotations

import os

import torch

# Set before triton is imported, or not at all: scripts/test runs the kernel tests in a process of their own.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def assert_within_one_ulp(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """One ulp of the result, and where terms cancel a few of float32 at the size of the terms."""
    expected_exact, error = expected.float(), (actual.float() - expected.float()).abs()
    assert actual.isfinite().all()
    rounding = 4 * torch.finfo(torch.float32).eps * expected_exact.abs().amax()
    assert (error <= torch.finfo(expected.dtype).eps * expected_exact.abs() + rounding).all()


def assert_within_three_roundings(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Terms and sums rounded to the results' type: a few half ulps at the size of the terms, and little on average."""
    error = (actual.float() - expected.float()).abs()
    assert actual.isfinite().all()
    assert (error <= 1.5 * torch.finfo(expected.dtype).eps * expected.float().abs().amax()).all()
    average = expected.float().square().mean().sqrt()
    assert error.square().mean().sqrt() <= 0.6 * torch.finfo(expected.dtype).eps * average

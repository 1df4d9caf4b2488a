"""What the caller is told while kernels compile."""

from __future__ import annotations

import logging
import time

import pytest

from benchmarks.bare_pack import bare_module

triton = pytest.importorskip("triton")


class Kernel:
    """In the place of one that has to be compiled, for nothing is where these tests run."""

    __name__ = "kernel"

    def __init__(self):
        self.launched, self.compiled = [], []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launched.append((grid, arguments, constants))

    def warmup(self, *arguments, grid, **constants):
        self.compiled.append((grid, arguments, constants))


@pytest.fixture
def launching():
    if not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("this Triton compiles one kernel at a time")
    return bare_module("kernels.launching")


def test_a_long_wait_for_the_compiler_is_explained(launching, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    with launching.rehearsal():
        pass
    assert not caplog.messages
    monkeypatch.setattr(launching, "PATIENCE", 0.0)
    with launching.rehearsal():
        while not caplog.messages:
            time.sleep(0.01)
    assert len(caplog.messages) == 1 and "compiling kernels" in caplog.messages[0]


def test_a_rehearsal_compiles_and_launches_nothing(launching):
    kernel = Kernel()
    with pytest.raises(ValueError, match="the rehearsed work's own"), launching.rehearsal():
        launching.launch(kernel, (4,), (1, 2), W=16)
        raise ValueError("the rehearsed work's own")
    assert not kernel.launched and kernel.compiled == [((4, 1, 1), (1, 2), {"W": 16})]
    launching.launch(kernel, (4,), (1, 2), W=16)
    assert len(kernel.launched) == len(kernel.compiled) == 1

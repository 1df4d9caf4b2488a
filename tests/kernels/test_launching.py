"""What the caller is told while kernels compile."""

from __future__ import annotations

import logging

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


def test_a_wait_for_the_compiler_is_explained_once(monkeypatch, caplog):
    launching = bare_module("kernels.launching")
    launching.tell_that_it_compiles.cache_clear()
    caplog.set_level(logging.INFO)
    launching.launch(Kernel(), (1,), (1, 2))
    assert not caplog.messages
    monkeypatch.setattr(launching, "NOTICED", -1.0)
    for _ in range(2):
        launching.launch(Kernel(), (1,), (1, 2))
    assert len(caplog.messages) == 1 and "compiling kernels" in caplog.messages[0]


def test_a_rehearsal_compiles_and_launches_nothing():
    launching, kernel = bare_module("kernels.launching"), Kernel()
    if not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("this Triton compiles one kernel at a time")
    with pytest.raises(ValueError, match="the rehearsed work's own"), launching.rehearsal():
        launching.launch(kernel, (4,), (1, 2), W=16)
        raise ValueError("the rehearsed work's own")
    assert not kernel.launched and kernel.compiled == [((4, 1, 1), (1, 2), {"W": 16})]
    launching.launch(kernel, (4,), (1, 2), W=16)
    assert len(kernel.launched) == len(kernel.compiled) == 1

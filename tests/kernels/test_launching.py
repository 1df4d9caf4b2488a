"""What the caller is told while kernels compile."""

from __future__ import annotations

import logging

from benchmarks.bare_pack import bare_module


class Slow:
    """In the place of a kernel that has to be compiled, for nothing is where these tests run."""

    __name__ = "slow"

    def __getitem__(self, grid):
        return lambda *arguments, **constants: None


def test_a_wait_for_the_compiler_is_explained_once(monkeypatch, caplog):
    launching = bare_module("kernels.launching")
    launching.tell_that_it_compiles.cache_clear()
    caplog.set_level(logging.INFO)
    launching.launch(Slow(), (1,), (1, 2))
    assert not caplog.messages
    monkeypatch.setattr(launching, "NOTICED", -1.0)
    for _ in range(2):
        launching.launch(Slow(), (1,), (1, 2))
    assert len(caplog.messages) == 1 and "compiling kernels" in caplog.messages[0]

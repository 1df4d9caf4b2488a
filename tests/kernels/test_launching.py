"""What the caller is told while kernels compile."""

from __future__ import annotations

import logging
import time

import pytest

from benchmarks.bare_pack import bare_module

triton = pytest.importorskip("triton")


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
        waited = time.monotonic()
        while not caplog.messages and time.monotonic() - waited < 20:
            time.sleep(0.01)
    assert len(caplog.messages) == 1 and "compiling kernels" in caplog.messages[0]

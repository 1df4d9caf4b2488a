"""Launch a Triton kernel that was launched with arguments of the same kind before, without Triton's own bookkeeping.

Triton looks for the compiled kernel anew at every launch, which can take the caller longer than the kernel runs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
import triton

logger = logging.getLogger(__name__)

# Seconds after which somebody may wonder why a run stands still; finding kernels on disk takes less.
PATIENCE = 2.0
# The longest of some twenty kernels takes a quarter of the time of all, so that more would find nothing to do.
COMPILERS = min(8, os.cpu_count() or 1)
_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)
# Compiled kernels and the values of their constants, by kernel, device, constants, options and kinds of arguments.
_compiled: dict[tuple, tuple[Any, tuple]] = {}


def launch(kernel, grid: tuple[int, ...], arguments: tuple, **constants) -> None:
    """`kernel[grid](*arguments, **constants)`; `arguments` are all that are neither constants nor options, in order."""
    grid = (*grid, 1, 1)[:3]
    if _rehearsing.get():
        kernel.warmup(*arguments, grid=grid, **constants)
        return
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    kinds = tuple([_whole(a) if a.__class__ is int else _kind(a) for a in arguments])
    key = kernel.__name__, device, tuple(constants.items()), kinds
    if key in _compiled:
        compiled, values = _compiled[key]
        compiled[grid](*arguments, *values)
        return
    compiled = kernel[grid](*arguments, **constants)
    # The interpreter compiles nothing.
    if isinstance(compiled, triton.compiler.CompiledKernel):
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names if name in constants)


def can_rehearse() -> bool:
    """Whether there is something to compile, and this Triton can do that in several threads."""
    return hasattr(triton, "AsyncCompileMode") and not triton.knobs.runtime.interpret


@contextmanager
def rehearsal() -> Iterator[None]:
    """Within, `launch` launches nothing; at the end all kernels that it would have launched are compiled, side by side.

    Otherwise they are compiled one after the other while the run stands still. What fails to compile here fails again
    where it is launched, and is handled there.
    """
    told = "QuantWM: compiling kernels for this GPU, up to half a minute. Later runs find them on disk."
    notice = threading.Timer(PATIENCE, logger.info, [told])
    notice.daemon = True
    notice.start()
    try:
        with ThreadPoolExecutor(COMPILERS) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
            before = _rehearsing.set(True)
            try:
                yield
            finally:
                _rehearsing.reset(before)
    finally:
        notice.cancel()


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` `[..., D]` with channels side by side, as all kernels read it; copied only if it is not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _kind(value: Any) -> Any:
    """What Triton compiles for: the type, and of a tensor its alignment by 16."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return type(value)


@lru_cache(maxsize=4096)
def _whole(value: int) -> tuple[bool, bool, bool]:
    """What Triton compiles for of a whole number: being one, divisible by 16, in 32 bits."""
    return value == 1, value % 16 == 0, -(2**31) <= value < 2**31

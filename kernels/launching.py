"""Launch a Triton kernel that was launched with arguments of the same kind before, without Triton's own bookkeeping.

Triton looks for the compiled kernel anew at every launch, which can take the caller longer than the kernel runs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

# Compiled kernels and the names of their constants, by kernel, device, constants, options and kinds of arguments.
_compiled: dict[tuple, tuple[Any, tuple[str, ...]]] = {}


def launch(kernel, grid: tuple[int, int, int], arguments: tuple, **constants) -> None:
    """`kernel[grid](*arguments, **constants)`; `arguments` are all that are neither constants nor options, in order."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    key = kernel.__name__, device, tuple(constants.items()), tuple(map(_kind, arguments))
    if key in _compiled:
        compiled, names = _compiled[key]
        compiled[grid](*arguments, *(constants[name] for name in names))
        return
    compiled = kernel[grid](*arguments, **constants)
    # The interpreter compiles nothing.
    if isinstance(compiled, triton.compiler.CompiledKernel):
        _compiled[key] = compiled, tuple(name for name in kernel.arg_names if name in constants)


def _kind(value: Any) -> Any:
    """What Triton compiles for: the type, alignment by 16, and the number one."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    return type(value)

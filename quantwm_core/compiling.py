"""What torch.compile must not trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch


def uncompiled(function: Callable) -> Callable:
    """Decorator: a graph ends before the function and a new one begins after it; nothing inside is compiled.

    As `torch.compiler.disable`, which would import the compiler, for more than a second, where nothing is compiled.
    """
    disabled: list[Callable] = []

    @functools.wraps(function)
    def run(*args, **kwargs):
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return run

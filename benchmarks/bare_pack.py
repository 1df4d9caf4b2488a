"""The pack's core and kernels without ComfyUI, for machines that have a GPU and nothing else."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from .host import ROOT

BARE_NAME = "quantwm_bare"


def bare_module(name: str) -> ModuleType:
    """A module of the pack, such as "kernels.decode", in a package that never runs the pack's own __init__."""
    if BARE_NAME not in sys.modules:
        package = ModuleType(BARE_NAME)
        package.__path__ = [str(ROOT)]
        sys.modules[BARE_NAME] = package
    return importlib.import_module(f"{BARE_NAME}.{name}")

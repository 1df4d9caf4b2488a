"""The host and the tiny world's runtime package, as the training code imports them.

Importing this module starts ComfyUI in the process: everything else here imports `comfy` after it. The
runtime package is loaded by path because the pack around it uses relative imports and belongs to the host.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from benchmarks.host import ROOT, start_host

_NAME = "tiny_world"


def _load() -> ModuleType:
    start_host()
    folder = ROOT / "world_models" / "tiny_world"
    spec = importlib.util.spec_from_file_location(
        _NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module


tiny_world = _load()
codec = sys.modules[f"{_NAME}.codec"]
conditioning = sys.modules[f"{_NAME}.conditioning"]
render = sys.modules[f"{_NAME}.render"]

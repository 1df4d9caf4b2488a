"""Bring a real ComfyUI and this pack into the current process, without a server."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PACK_NAME = "quantwm_pack"


def comfyui_path() -> Path:
    """Folder of the ComfyUI checkout: COMFYUI_PATH, else the one scripts/setup fetched."""
    path = Path(os.environ.get("COMFYUI_PATH") or ROOT / ".cache" / "comfyui")
    if not (path / "comfy" / "model_patcher.py").is_file():
        raise FileNotFoundError(
            f"No ComfyUI at {path}. Run scripts/setup, or set COMFYUI_PATH to an existing checkout."
        )
    return path


def start_host(cpu: bool | None = None) -> None:
    """Import ComfyUI in this process; on the CPU where there is no GPU or `cpu` asks for it.

    ComfyUI reads its command line while it is imported, so this must run before anything imports `comfy`.
    Its folder goes first on the path: the pack has a `nodes` package that would shadow ComfyUI's module.
    """
    if "comfy" in sys.modules:
        return
    import torch

    sys.path.insert(0, str(comfyui_path()))
    arguments = sys.argv
    sys.argv = [arguments[0]] + (["--cpu"] if cpu or not torch.cuda.is_available() else [])
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.model_management  # noqa: F401  (parses the command line)
    finally:
        sys.argv = arguments


def load_pack() -> ModuleType:
    """The pack as a package, the way ComfyUI's loader does it: by path, so that only relative imports work."""
    return import_folder(PACK_NAME, ROOT)


def import_folder(name: str, folder: Path) -> ModuleType:
    """The package in `folder` under a name of its own; imported once."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

"""Weight files: safetensors with what a reader must know in the metadata."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from .network import HOST_CONFIG
from .pack import codec as codec_module

_LICENCE = "Apache-2.0"


def save_world(model: nn.Module, path: Path, **facts: object) -> None:
    """The model in bfloat16; `config` makes ComfyUI's loaders build a CausalWanModel of the right size."""
    weights = {name: value.to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    _save(weights, path, {"name": "QuantWM tiny world", "config": json.dumps(HOST_CONFIG), **facts})


def load_world(model: nn.Module, path: Path) -> None:
    """Start a model from a weight file."""
    weights = load_file(path)
    model.load_state_dict({name: value.float() for name, value in weights.items()})


def save_codec(codec: codec_module.TinyWorldCodec, path: Path, **facts: object) -> None:
    """The codec in float16, far finer than its own error; it runs in float32."""
    weights = {name: value.to("cpu", torch.float16).contiguous() for name, value in codec.state_dict().items()}
    _save(weights, path, {"name": "QuantWM tiny world codec", **codec.config.metadata(), **facts})


def add_facts(path: Path, **facts: object) -> None:
    """Write measured numbers into the metadata of a finished weight file."""
    with safe_open(str(path), "pt") as file:
        metadata = file.metadata()
    _save(load_file(path), path, {**metadata, **facts})


def _save(weights: dict[str, torch.Tensor], path: Path, metadata: dict[str, object]) -> None:
    metadata = {"licence": _LICENCE, "command": _command(), **metadata}
    partial = path.with_suffix(".partial")
    save_file(weights, partial, {name: str(value) for name, value in metadata.items()})
    os.replace(partial, path)


def _command() -> str:
    """The command line, without this machine's folders."""
    arguments = sys.argv[1:]
    for option in ("--out", "--resume"):
        if option in arguments:
            arguments[arguments.index(option) + 1] = "DIR"
    for option, values in (("--compare", 2), ("--dump", 1)):
        if option in arguments:
            where = arguments.index(option)
            del arguments[where : where + values]
    return " ".join(["python scripts/train_tiny_world.py", *arguments])

"""Load a world model's checkpoint in any layout that its authors publish."""

from __future__ import annotations

import importlib.util
import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import comfy.sd
import comfy.utils
import torch

from . import lingbot, longcat

logger = logging.getLogger(__name__)

WEIGHT_DTYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}

# Averaged weights come first: the papers' results are made with them.
GENERATORS = ("generator_ema", "generator")

# What training frameworks put into parameter names around the real ones.
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")

# A key that only Wan has, and all Wan have: what stands before it is the prefix of the file.
ANCHOR = "head.modulation"
HEAD_DIM = 128

# Large checkpoints are published in parts: name-00001-of-00007.safetensors.
SHARD = re.compile(r"(?P<name>.*)-(?P<part>\d+)-of-(?P<parts>\d+)(?P<suffix>\.safetensors)")


def load_world_model(path: str, weight_dtype: str = "default", disable_dynamic: bool = False):
    """MODEL of the world model checkpoint at `path`: an autoregressive Wan, LingBot-World or LongCat-Video.

    Reads safetensors with or without the causal marker in the metadata, also in parts (`path` is any of them), and
    `.pt` files that hold the weights under `generator` or `generator_ema` (the latter is preferred), bare or wrapped
    by FSDP. Pickles are read with `weights_only`, so a file cannot run code. LingBot-World is told by its camera
    layers, LongCat-Video by its own keys. `disable_dynamic` is what ComfyUI passes when it reloads a model for a
    second GPU.

    Raises ValueError naming what was found when the file holds anything else, RuntimeError when this ComfyUI
    has no autoregressive Wan.
    """
    _require_autoregressive_host()
    stored, metadata = _read(path)
    options = dict(WEIGHT_DTYPES[weight_dtype])
    if longcat.is_longcat(stored):
        model = longcat.build(stored, metadata, path, options, disable_dynamic)
        model.cached_patcher_init = (load_world_model, (path, weight_dtype))
        return model
    weights = _generator(stored, path)
    metadata = _causal_metadata(weights, metadata, path)
    if lingbot.is_lingbot(weights):
        lingbot.check_weights(weights, path)
        model = lingbot.build(weights, metadata, options, disable_dynamic)
    else:
        model = comfy.sd.load_diffusion_model_state_dict(
            weights, model_options=options, metadata=metadata, disable_dynamic=disable_dynamic
        )
    if model is None or not hasattr(model.model.diffusion_model, "init_kv_caches"):
        raise ValueError(
            f"{path} looks like Wan, but ComfyUI does not load it as an autoregressive model. "
            f"{_contents(weights)} Use a text-to-video checkpoint such as Causal-Forcing or Self-Forcing, or "
            "LingBot-World."
        )
    model.cached_patcher_init = (load_world_model, (path, weight_dtype))
    return model


def _require_autoregressive_host() -> None:
    if importlib.util.find_spec("comfy.ldm.wan.ar_model") is None:
        from comfyui_version import __version__

        raise RuntimeError(
            f"ComfyUI {__version__} cannot sample autoregressive video models; version 0.30.0 can. Update ComfyUI."
        )


def one_of_each(names: list[str]) -> list[str]:
    """The names of checkpoints: of one that lies in parts, the first part's only."""
    parts = {name: SHARD.fullmatch(name) for name in names}
    return [name for name, shard in parts.items() if shard is None or int(shard["part"]) == 1]


def _parts(path: str) -> list[str]:
    """All files of the checkpoint that `path` belongs to."""
    shard = SHARD.fullmatch(path)
    if shard is None:
        return [path]
    digits = len(shard["part"])
    count = f"-of-{shard['parts']}{shard['suffix']}"
    files = [f"{shard['name']}-{part:0{digits}d}{count}" for part in range(1, int(shard["parts"]) + 1)]
    missing = [Path(file).name for file in files if not Path(file).is_file()]
    if missing:
        raise ValueError(
            f"{path} is one of {len(files)} parts, and {len(missing)} of them are missing: {', '.join(missing[:4])}"
            f"{', ...' if len(missing) > 4 else ''}. Download them into the same folder."
        )
    return files


def _read(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Everything stored in the file or its parts, and the metadata; sizes from the folder's config.json join it."""
    stored, metadata = {}, {}
    files = _parts(path)
    for file in files:
        part, found = _read_file(file)
        stored |= part
        metadata |= found
    settings = Path(path).with_name("config.json")
    if len(files) > 1 and settings.is_file() and "config" not in metadata:
        heads = json.loads(settings.read_text()).get("num_heads")
        if heads:
            metadata["config"] = json.dumps({"transformer": {"num_heads": heads}})
    return stored, metadata


def _read_file(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        stored, metadata = comfy.utils.load_torch_file(path, safe_load=True, return_metadata=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than weights, so it is not opened: a pickle can run code. "
            f"Use a safetensors file, or a .pt with plain tensors. ({str(error).splitlines()[0]})"
        ) from error
    if not isinstance(stored, dict):
        raise ValueError(f"{path} holds a {type(stored).__name__}, not a dictionary of weights.")
    return stored, metadata or {}


def _generator(stored: dict[str, Any], path: str) -> dict[str, torch.Tensor]:
    """The generator's weights under ComfyUI's own names, taken out of whatever is wrapped around them."""
    nested = next((stored[name] for name in GENERATORS if isinstance(stored.get(name), dict)), stored)
    named = {_unwrapped(key): value for key, value in nested.items() if isinstance(value, torch.Tensor)}
    prefixes = [key.removesuffix(ANCHOR) for key in named if key.endswith(ANCHOR)]
    if not prefixes:
        raise ValueError(
            f"{path} is not a Wan checkpoint: no weight is called ...{ANCHOR}. {_contents(stored)} "
            "Expected safetensors of an autoregressive Wan, the authors' .pt with generator or generator_ema, or "
            "LongCat-Video."
        )
    prefix = min(prefixes, key=lambda name: (_rank(name), len(name)))
    return {key.removeprefix(prefix): value for key, value in named.items() if key.startswith(prefix)}


def _unwrapped(key: str) -> str:
    for wrapper in WRAPPERS:
        key = key.replace(wrapper, "")
    return key


def _rank(prefix: str) -> int:
    return next((i for i, name in enumerate(GENERATORS) if prefix.startswith(f"{name}.")), len(GENERATORS))


def _causal_metadata(weights: dict[str, torch.Tensor], metadata: dict[str, str], path: str) -> dict[str, str]:
    """Metadata with the causal marker, and with the sizes that ComfyUI would otherwise take for granted."""
    config = json.loads(metadata.get("config", "{}"))
    transformer = config.setdefault("transformer", {})
    if not transformer.get("causal_ar"):
        logger.info("%s carries no causal marker; loading it as an autoregressive model", path)
        transformer["causal_ar"] = True
    dim = weights[ANCHOR].shape[-1]
    if "num_heads" not in transformer and dim % HEAD_DIM:
        raise ValueError(
            f"{path} is {dim} wide, which is no multiple of {HEAD_DIM}, so the number of heads is unknown. "
            'Put it into the safetensors metadata: config = {"transformer": {"causal_ar": true, "num_heads": '
            "N}}."
        )
    for name, key in (("text_dim", "text_embedding.0.weight"), ("freq_dim", "time_embedding.0.weight")):
        if key in weights:
            transformer.setdefault(name, weights[key].shape[1])
    return metadata | {"config": json.dumps(config)}


def _contents(stored: dict[str, Any], limit: int = 4) -> str:
    shown = [
        f"{key} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{key} ({type(value).__name__})"
        for key, value in list(stored.items())[:limit]
    ]
    noun = "entry" if len(stored) == 1 else "entries"
    return f"Found {len(stored)} {noun}: {', '.join(shown)}{', ...' if len(stored) > limit else ''}."

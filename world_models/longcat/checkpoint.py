"""LongCat-Video checkpoints: told by their keys, renamed to the network's names, and what else they say of themselves.

Two layouts are published: the official one (`dit/` of meituan-longcat/LongCat-Video, in shards, with joined projections
`blocks.N.attn.qkv` and `blocks.N.cross_attn.kv_linear`), and a repack under Wan's names with single projections
(Kijai/LongCat-Video_comfy; names as in ComfyUI-WanVideoWrapper, the file itself was not inspected). The
network has the latter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import comfy.ops
import torch

from .network import LongCatModel

# A key that only this layout of LongCat has: what stands before it is the prefix of the file.
OFFICIAL_ANCHOR = "y_embedder.y_proj.0.weight"
REPACK_ANCHOR = "head.modulation.1.weight"
SWIGLU = "blocks.0.ffn.w1.weight"

JOINED = {
    ".attn.qkv.": (".self_attn.q.", ".self_attn.k.", ".self_attn.v."),
    ".cross_attn.kv_linear.": (".cross_attn.k.", ".cross_attn.v."),
}
RENAMED = {
    "x_embedder.proj.": "patch_embedding.",
    "y_embedder.y_proj.": "text_embedding.",
    "t_embedder.": "time_embedding.",
    "final_layer.linear.": "head.head.",
    "final_layer.adaLN_modulation.": "head.modulation.",
    ".adaLN_modulation.": ".modulation.",
    ".attn.proj.": ".self_attn.o.",
    ".attn.q_norm.": ".self_attn.norm_q.",
    ".attn.k_norm.": ".self_attn.norm_k.",
    ".pre_crs_attn_norm.": ".norm3.",
    ".cross_attn.q_linear.": ".cross_attn.q.",
    ".cross_attn.proj.": ".cross_attn.o.",
    ".cross_attn.q_norm.": ".cross_attn.norm_q.",
    ".cross_attn.k_norm.": ".cross_attn.norm_k.",
}

# Where a checkpoint does not say it itself. The published code's class attends to used rows only, the published
# config.json and the ports to all of them.
DEFAULT_SHIFT = 12.0
DEFAULT_ATTENDS_PADDING = True


@dataclass(frozen=True)
class Facts:
    """What weights do not show, and who says so: the shift of noise levels, whether a prompt's padding is attended."""

    shift: float = DEFAULT_SHIFT
    shift_from: str = "default"
    attends_padding: bool = DEFAULT_ATTENDS_PADDING
    padding_from: str = "default"

    def text(self) -> str:
        """Two lines for people."""
        padding = "attended" if self.attends_padding else "left out"
        return f"shift {self.shift:g} ({self.shift_from})\nempty rows of the prompt {padding} ({self.padding_from})"


def is_longcat(stored: dict) -> bool:
    """Whether these are weights of LongCat-Video, in either layout and behind any prefix."""
    return _prefix(stored) is not None and any(key.endswith(SWIGLU) for key in stored)


def network_weights(stored: dict[str, torch.Tensor], path: str) -> dict[str, torch.Tensor]:
    """The weights under the network's names.

    Raises:
        ValueError: when weights are missing, or belong to the variant with audio.
    """
    prefix = _prefix(stored)
    weights: dict[str, torch.Tensor] = {}
    for key, value in stored.items():
        if key.startswith(prefix):
            targets = renamed(key.removeprefix(prefix))
            # What describes a whole tensor, its scale or its format, holds for each part of it.
            whole = len(targets) == 1 or value.ndim == 0 or key.endswith("comfy_quant")
            weights |= zip(targets, [value] * len(targets) if whole else value.chunk(len(targets)))
    if any("audio" in key for key in weights):
        raise ValueError(
            f"{path} is LongCat-Video-Avatar, which follows a voice; only LongCat-Video itself is supported. Use dit/ "
            "of meituan-longcat/LongCat-Video or its repack."
        )
    with torch.device("meta"):
        expected = LongCatModel(**sizes(weights), operations=comfy.ops.disable_weight_init).state_dict()
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise ValueError(
            f"{path} looks like LongCat-Video, but {len(missing)} of {len(expected)} weights are missing: "
            f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}. Get the checkpoint again with all parts."
        )
    return weights


def renamed(key: str) -> list[str]:
    """The network's names for an official one: several where it joins projections; itself where it is the network's."""
    for old, new in JOINED.items():
        if old in key:
            return [key.replace(old, part) for part in new]
    for old, new in RENAMED.items():
        if old in key:
            return [key.replace(old, new)]
    return [key]


def sizes(weights: dict[str, torch.Tensor]) -> dict:
    """Arguments of the network, from weights under its names.

    Raises:
        ValueError: when a weight that shows a size is missing.
    """
    shown = (
        "patch_embedding.weight",
        "blocks.0.ffn.w1.weight",
        "blocks.0.self_attn.norm_q.weight",
        "text_embedding.0.weight",
        "time_embedding.mlp.0.weight",
        "head.head.weight",
    )
    missing = [key for key in shown if key not in weights]
    if missing:
        raise ValueError(f"a LongCat-Video checkpoint shows its sizes in {', '.join(missing)}, which this one lacks.")
    patch, ffn, norm, text, step, head = (weights[key].shape for key in shown)
    blocks = {int(key.split(".")[1]) for key in weights if key.startswith("blocks.")}
    return {
        "in_dim": patch[1],
        "dim": patch[0],
        "patch_size": tuple(patch[2:]),
        "ffn_dim": ffn[0],
        "num_heads": patch[0] // norm[0],
        "num_layers": max(blocks) + 1,
        "text_dim": text[1],
        "step_dim": step[0],
        "freq_dim": step[1],
        "out_dim": head[0] // (patch[2] * patch[3] * patch[4]),
    }


def facts(path: str, metadata: dict[str, str]) -> Facts:
    """What the checkpoint's own configuration says.

    Looked for in the metadata's `config` (`{"transformer": {"text_tokens_zero_pad": true}, "scheduler": {"shift":
    12}}`), in `config.json` beside the weights, and in `scheduler_config.json` beside them or in the folder `scheduler`
    next to theirs, as in the official download.
    """
    inside = json.loads(metadata.get("config", "{}"))
    here = Path(path).parent
    found: dict = {}
    network = [("metadata", inside.get("transformer", {})), ("config.json", _read(here / "config.json", "LongCat"))]
    for source, settings in network:
        if "text_tokens_zero_pad" in settings and "padding_from" not in found:
            found |= {"attends_padding": bool(settings["text_tokens_zero_pad"]), "padding_from": source}
    name = "scheduler_config.json"
    schedules = [("metadata", inside.get("scheduler", {}))]
    schedules += [(name, _read(folder / name, "Flow")) for folder in (here, here.parent / "scheduler")]
    for source, settings in schedules:
        if "shift" in settings and "shift_from" not in found:
            found |= {"shift": float(settings["shift"]), "shift_from": source}
    return Facts(**found)


def _prefix(stored: dict) -> str | None:
    """What stands before the network's own names."""
    for anchor in (OFFICIAL_ANCHOR, REPACK_ANCHOR):
        found = [key.removesuffix(anchor) for key in stored if isinstance(key, str) and key.endswith(anchor)]
        if found:
            return min(found, key=len)
    return None


def _read(file: Path, kind: str) -> dict:
    """A configuration, if it is there and of a class whose name contains `kind`: folders are shared by many models."""
    if not file.is_file():
        return {}
    settings = json.loads(file.read_text())
    return settings if kind in settings.get("_class_name", "") else {}

"""QuantWM KV Cache: the settings of a packed cache, checked here so that nothing wrong reaches a sampler."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..quantwm_core import BITS, METHODS, CacheSettings
from ..quantwm_core.presets import CUSTOM, PRESET_NAMES, PRESETS, with_preset
from ..quantwm_core.settings import BACKENDS, CACHE_DEVICES, GROUP_SIZES, JENSEN, MAX_CENTROIDS, MAX_RANK
from .sockets import CATEGORY, SettingsSocket

BIT_CHOICES = [str(bits) for bits in BITS]


class QuantWMKVCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMKVCache",
            display_name="QuantWM KV Cache",
            category=CATEGORY,
            description=(
                "How the memory (KV cache) of a world model is stored. The defaults keep keys and values in "
                "2 bits. Connect it to Apply To World Model."
            ),
            search_aliases=[
                "kv cache",
                "2 bit",
                "quantize cache",
                "cache quantization",
                "low vram video",
                "kv quant",
            ],
            inputs=[
                io.Combo.Input(
                    "method",
                    options=list(METHODS),
                    default="quantwm",
                    tooltip=(
                        "How keys and values are packed.\n"
                        "quantwm (default): our best.\n"
                        "off: plain BF16, bit-equal to ComfyUI without these nodes; use it to compare.\n"
                        "quantwm-paper: the published method to the letter.\n"
                        "rtn: plain rounding, the baseline of the comparisons.\n"
                        "kivi: keys by channel, values by token, the newest 128 tokens in BF16.\n"
                        "qvg, qvg-pro: Quant VideoGen with one and with four stages of centroids.\n"
                        "quarot: plain rounding after a Hadamard rotation."
                    ),
                ),
                io.Combo.Input(
                    "key_bits",
                    options=BIT_CHOICES,
                    default="2",
                    tooltip=(
                        "Bits for each number of a key (default 2). Keys carry most of the damage: go to 4 "
                        "here first when the picture drifts. 16 keeps keys in BF16."
                    ),
                ),
                io.Combo.Input(
                    "value_bits",
                    options=BIT_CHOICES,
                    default="2",
                    tooltip=(
                        "Bits for each number of a value (default 2). Values are forgiving; raise this after "
                        "key_bits. 16 keeps values in BF16."
                    ),
                ),
                io.Int.Input(
                    "group_size",
                    default=64,
                    min=min(GROUP_SIZES),
                    max=max(GROUP_SIZES),
                    step=16,
                    advanced=True,
                    tooltip=(
                        "How many numbers share one scale: 16, 32, 64 (default) or 128. Smaller follows the "
                        "data more closely and costs more bytes. kivi (32) and qvg-pro (16) keep their own."
                    ),
                ),
                io.Int.Input(
                    "centroids",
                    default=0,
                    min=0,
                    max=MAX_CENTROIDS,
                    advanced=True,
                    tooltip=(
                        "Size of the codebook that is subtracted before rounding. 0 (default) chooses it "
                        "from the number of tokens in a span; the paper uses 256. Lower it if short blocks "
                        "spend their bytes on the codebook."
                    ),
                ),
                io.Int.Input(
                    "candidates",
                    default=0,
                    min=0,
                    max=MAX_CENTROIDS,
                    advanced=True,
                    tooltip=(
                        "How many nearby centroids are tried for each token. 0 (default) is automatic: only the "
                        "nearest for 2-bit keys of quantwm at its automatic rank, otherwise 4. More encodes slower; "
                        "it costs no memory."
                    ),
                ),
                io.Int.Input(
                    "rank",
                    default=0,
                    min=0,
                    max=MAX_RANK,
                    advanced=True,
                    tooltip=(
                        "Directions in which the remaining error of keys is stored as well. 0 (default) is "
                        "automatic; the paper uses 8. Higher looks better and costs bytes."
                    ),
                ),
                io.Int.Input(
                    "span_blocks",
                    default=0,
                    min=0,
                    max=64,
                    advanced=True,
                    tooltip=(
                        "How many blocks of the video are packed together. 0 (default) is automatic: each "
                        "block as soon as it is finished. Larger shares one codebook, but the waiting blocks "
                        "stay in BF16."
                    ),
                ),
                io.Int.Input(
                    "keep_first_blocks",
                    default=0,
                    min=0,
                    max=64,
                    advanced=True,
                    tooltip=(
                        "Blocks at the start that stay in BF16 (default 0). Try 1 when the whole video hangs "
                        "on a start image."
                    ),
                ),
                io.Int.Input(
                    "keep_recent_blocks",
                    default=0,
                    min=0,
                    max=64,
                    advanced=True,
                    tooltip=(
                        "Newest blocks that stay in BF16 until they get older (default 0). Try 1 when motion "
                        "between neighbouring blocks flickers."
                    ),
                ),
                io.Combo.Input(
                    "cache_device",
                    options=list(CACHE_DEVICES),
                    default="gpu",
                    advanced=True,
                    tooltip=(
                        "Where packed blocks live. gpu (default) is fastest. cpu frees graphics memory for "
                        "very long videos and is slower, because each read crosses the bus."
                    ),
                ),
                io.Combo.Input(
                    "backend",
                    options=list(BACKENDS),
                    default="auto",
                    advanced=True,
                    tooltip=(
                        "Which code packs and reads. auto (default) takes the fastest that runs here. torch "
                        "runs everywhere; triton needs an NVIDIA GPU. Change it only to look for a fault."
                    ),
                ),
                # Optional, as every input that comes after it must be: prompts saved before have none.
                io.Combo.Input(
                    "jensen",
                    options=list(JENSEN),
                    default="off",
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "Takes back the extra attention that rounded keys draw by their noise, with any method. "
                        "off (default) is fastest. second-order costs little; exact is slow and for "
                        "measurements. It pays where attention spreads over many keys, and costs where a few win."
                    ),
                ),
                io.String.Input(
                    "bit_overrides",
                    default="",
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "Other bits for some layers or heads, counted from 0; empty (default) for none. 5=4 keeps "
                        "layer 5 in 4 bits, 2.0=16 head 0 of layer 2 in BF16, 0-3=4/2 layers 0 to 3 with keys in 4 "
                        "and values in 2 bits. Commas between; later ones win."
                    ),
                ),
                io.Combo.Input(
                    "preset",
                    options=list(PRESET_NAMES),
                    default=CUSTOM,
                    optional=True,
                    # For the page, which fills the other inputs in when a preset is chosen.
                    extra_dict={"presets": {name: _as_widgets(values) for name, values in PRESETS.items()}},
                    tooltip=(
                        "Fills in all inputs but cache_device and backend, and decides them when the graph runs.\n"
                        "balanced: the defaults.\n"
                        "smallest: fewer bytes in 2 bits, at a visible loss.\n"
                        "best quality: keys and values in 4 bits.\n"
                        "paper: the published method with its own numbers.\n"
                        "custom (default): what the inputs say. Changing one by hand comes back to it."
                    ),
                ),
            ],
            outputs=[
                SettingsSocket.Output("settings", display_name="settings", tooltip="For Apply To World Model."),
            ],
        )

    @classmethod
    def validate_inputs(cls, group_size: int | None = None, bit_overrides: str | None = None) -> bool | str:
        # Only the inputs that a plain range cannot describe are named here: ComfyUI repeats a refusal for each
        # named input, and stops checking the lists and ranges of those. None is a linked value, not known yet.
        known = {"group_size": group_size, "bit_overrides": bit_overrides}
        try:
            CacheSettings(**{name: value for name, value in known.items() if value is not None})
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, key_bits: str, value_bits: str, preset: str = CUSTOM, **settings) -> io.NodeOutput:
        chosen = {"key_bits": int(key_bits), "value_bits": int(value_bits), **settings}
        return io.NodeOutput(CacheSettings(**with_preset(preset, chosen)))


def _as_widgets(values: dict[str, Any]) -> dict[str, Any]:
    """A preset's values as this node's widgets hold them: bits are a list of words."""
    return values | {name: str(values[name]) for name in ("key_bits", "value_bits")}

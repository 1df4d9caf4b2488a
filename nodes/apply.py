"""Apply To World Model: a clone of the model whose sampling runs keep their cache packed."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .. import world_models
from .live import LivePanel
from .progress import block_text, executing_node_id, show_text
from .sockets import CATEGORY, CacheSocket, SettingsSocket


class QuantWMApply(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMApply",
            display_name="Apply To World Model",
            category=CATEGORY,
            description=(
                "Makes an autoregressive video model keep its KV cache packed while it samples. Place it "
                "between the loader (and LoRAs) and the sampler. Bypass it to get the model back untouched."
            ),
            search_aliases=[
                "quantwm",
                "kv cache",
                "patch world model",
                "causal wan",
                "self forcing",
                "2 bit cache",
            ],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip=(
                        "An autoregressive world model: Causal-Forcing, Self-Forcing and the like, or LingBot-World, "
                        "sampled by World Sampler or Sampler AR Video; or LongCat-Video, with any sampler. Other "
                        "models are refused here."
                    ),
                ),
                SettingsSocket.Input(
                    "settings",
                    tooltip="From QuantWM KV Cache. Change the settings there, not here.",
                ),
            ],
            outputs=[
                io.Model.Output("patched_model", display_name="MODEL", tooltip="For the sampler's guider."),
                CacheSocket.Output(
                    "cache",
                    display_name="cache",
                    tooltip="What the last run of this model stored; for Cache Memory Stats.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model, settings) -> io.NodeOutput:
        own_id = cls.hidden.unique_id if cls.hidden else None
        panel = LivePanel(own_id)

        def on_block(entry: dict[str, Any]) -> None:
            show_text(block_text(entry), executing_node_id(), own_id)
            panel.send(handle)

        patched, handle = world_models.attach(model, settings, on_block=on_block)
        return io.NodeOutput(patched, handle)

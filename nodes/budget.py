"""Cache Budget: a size that the cache may take, and bits that follow from it."""

from __future__ import annotations

from dataclasses import replace

from comfy_api.latest import io

from .sockets import CATEGORY, SettingsSocket


class QuantWMBudget(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMBudget",
            display_name="Cache Budget",
            category=CATEGORY,
            description=(
                "Gives the cache a size in GB. Blocks are kept in 8 bits while there is room; then the oldest go down "
                "to 4 bits, and to 2 when all have 4. Place it between QuantWM KV Cache and Apply To World Model."
            ),
            search_aliases=["quantwm", "windowquant", "vram limit", "memory limit", "mixed precision cache"],
            inputs=[
                SettingsSocket.Input(
                    "settings",
                    tooltip="From QuantWM KV Cache. Its key_bits and value_bits are the fewest that a block may get.",
                ),
                io.Float.Input(
                    "budget_gb",
                    default=2.0,
                    min=0.001,
                    max=1024.0,
                    step=0.1,
                    round=0.001,
                    tooltip=(
                        "What the cache may take, in GB of 2^30 bytes (default 2). More looks better until all blocks "
                        "have 8 bits. If even the fewest bits do not fit, the log and Cache Memory Stats say so."
                    ),
                ),
            ],
            outputs=[
                SettingsSocket.Output("limited", display_name="settings", tooltip="For Apply To World Model."),
            ],
        )

    @classmethod
    def execute(cls, settings, budget_gb: float) -> io.NodeOutput:
        return io.NodeOutput(replace(settings, budget_gb=budget_gb))

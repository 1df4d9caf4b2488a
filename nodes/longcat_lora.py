"""LongCat LoRA: the published LoRAs of LongCat-Video, whose names ComfyUI's own loader does not know."""

from __future__ import annotations

import folder_paths
from comfy_api.latest import io

from ..world_models import longcat
from .sockets import CATEGORY


class QuantWMLongCatLoRA(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMLongCatLoRA",
            display_name="LongCat LoRA",
            category=CATEGORY,
            description=(
                "Applies a LoRA to LongCat-Video, in the layout that its authors publish (cfg_step_lora, "
                "refinement_lora) or any that ComfyUI knows. Place it before or after Apply To World Model."
            ),
            search_aliases=["quantwm", "longcat", "lora", "distill", "cfg_step_lora", "refinement_lora"],
            inputs=[
                io.Model.Input("model", tooltip="LongCat-Video, from Load World Model."),
                io.Combo.Input(
                    "lora_name",
                    options=folder_paths.get_filename_list("loras"),
                    tooltip=(
                        "A file in models/loras. With the distillation LoRA take schedule distilled in LongCat "
                        "Scheduler, and cfg 1."
                    ),
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-20.0,
                    max=20.0,
                    step=0.01,
                    tooltip="1 (default): as published. 0 leaves the model as it is.",
                ),
            ],
            outputs=[io.Model.Output("model", display_name="MODEL", tooltip="The model with the LoRA.")],
        )

    @classmethod
    def execute(cls, model, lora_name: str, strength: float) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise("loras", lora_name)
        return io.NodeOutput(longcat.with_lora(model, path, strength))

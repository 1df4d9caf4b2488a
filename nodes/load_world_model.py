"""Load World Model: an autoregressive video model from any layout that its authors publish."""

from __future__ import annotations

import folder_paths
from comfy_api.latest import io

from ..world_models import longcat, tiny_world
from ..world_models.loading import WEIGHT_DTYPES, load_world_model, one_of_each
from .progress import show_text
from .sockets import CATEGORY

BUILT_IN = "tiny world (built in)"


class QuantWMLoadWorldModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMLoadWorldModel",
            display_name="Load World Model",
            category=CATEGORY,
            description=(
                "Loads an autoregressive Wan model (Causal-Forcing, Self-Forcing, LongLive and the like), "
                "LingBot-World or LongCat-Video: safetensors in one file or in parts, with or without the causal "
                "marker that the stock loader needs, and the authors' own .pt files. A Wan 2.1 text-to-video file "
                "always loads as autoregressive here."
            ),
            search_aliases=[
                "causal forcing",
                "self forcing",
                "longlive",
                "lingbot",
                "longcat",
                "load diffusion model",
                "autoregressive wan",
            ],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=[BUILT_IN, *one_of_each(folder_paths.get_filename_list("diffusion_models"))],
                    default=BUILT_IN,
                    tooltip=(
                        "A file in models/diffusion_models, or the small world that comes with this pack "
                        "(default): it needs no download and runs on any machine. Of a checkpoint in parts the "
                        "first is listed; all are loaded."
                    ),
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    default="default",
                    advanced=True,
                    tooltip=(
                        "Precision of the weights. default keeps what is in the file. The fp8 choices halve "
                        "the weights' memory at some cost in quality. The cache is set by QuantWM KV Cache, "
                        "not here."
                    ),
                ),
            ],
            outputs=[io.Model.Output("model", display_name="MODEL", tooltip="For Apply To World Model.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model_name: str, weight_dtype: str) -> io.NodeOutput:
        if model_name == BUILT_IN:
            path = str(tiny_world.WORLD_FILE)
        else:
            path = folder_paths.get_full_path_or_raise("diffusion_models", model_name)
        model = load_world_model(path, weight_dtype)
        text = longcat.describe(model)
        if text is not None:
            show_text(text, cls.hidden.unique_id if cls.hidden else None)
        return io.NodeOutput(model)

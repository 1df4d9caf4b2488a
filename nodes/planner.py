"""Memory Planner: what a video's cache will take with every method, and the best settings that fit a budget."""

from __future__ import annotations

from comfy_api.latest import io, ui

from .. import world_models
from ..quantwm_core.plan_table import GB, QUALITY_ORDER, describe_row, format_plan, make_plan, require_choice
from ..quantwm_core.window import MAX_FRAMES_PER_BLOCK
from .charts import chart_tensor
from .plan_chart import plan_chart
from .progress import show_text
from .sockets import CATEGORY, SettingsSocket

MAX_SIZE, SIZE_STEP = 8192, 16
MAX_LENGTH = 16384


class QuantWMPlanner(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMPlanner",
            display_name="Memory Planner",
            category=CATEGORY,
            description=(
                "Tells before a run what the KV cache of a video will take with every method, how long a video may "
                "get, and chooses the settings with the best picture that fit your memory."
            ),
            search_aliases=[
                "quantwm",
                "vram planner",
                "memory budget",
                "how long a video",
                "kv cache size",
                "estimate",
            ],
            inputs=_inputs(),
            outputs=[
                SettingsSocket.Output(
                    "settings",
                    display_name="settings",
                    tooltip="The best picture that fits, for Apply To World Model in place of QuantWM KV Cache.",
                ),
                io.String.Output("report", display_name="report", tooltip="The table as plain text."),
                io.Image.Output("chart", display_name="chart", tooltip="The table as a picture, for Save Image."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls,
        model,
        width: int,
        height: int,
        length: int,
        frames_per_block: int,
        budget: float,
        guidance: bool = False,
    ) -> io.NodeOutput:
        world = world_models.world_of(model, width, height).guided(guidance)
        latents = min(frames_per_block, world.latents(length))
        room = round(budget * GB) if budget else world_models.room_for_cache(model, width, height, latents)
        # Moving blocks to the CPU frees nothing where the model is there too.
        candidates = [s for s in QUALITY_ORDER if s.cache_device != "cpu" or model.load_device.type != "cpu"]
        plan = make_plan(world, length, frames_per_block, room, candidates)
        settings = require_choice(plan)
        report, chart = format_plan(plan), chart_tensor(plan_chart(plan))
        shown = f"{describe_row(plan.chosen)}\n" + report.splitlines()[1].rpartition(": ")[2]
        show_text(shown, cls.hidden.unique_id if cls.hidden else None)
        preview = ui.PreviewImage(chart, cls=cls).as_dict() | ui.PreviewText(report).as_dict()
        return io.NodeOutput(settings, report, chart, ui=preview)


def _inputs() -> list[io.Input]:
    return [
        io.Model.Input(
            "model", tooltip="The world model from its loader, before Apply To World Model. It is not run here."
        ),
        io.Int.Input(
            "width",
            default=832,
            min=SIZE_STEP,
            max=MAX_SIZE,
            step=SIZE_STEP,
            tooltip="Width of the video in pixels (default 832), as in Empty AR Video Latent.",
        ),
        io.Int.Input(
            "height",
            default=480,
            min=SIZE_STEP,
            max=MAX_SIZE,
            step=SIZE_STEP,
            tooltip="Height of the video in pixels (default 480).",
        ),
        io.Int.Input(
            "length",
            default=81,
            min=1,
            max=MAX_LENGTH,
            step=4,
            tooltip=(
                "Frames of the video (default 81), as in Empty AR Video Latent. With a window, plan only as many as "
                "window, sink and one block hold."
            ),
        ),
        io.Int.Input(
            "frames_per_block",
            default=3,
            min=1,
            max=MAX_FRAMES_PER_BLOCK,
            tooltip="Latent frames made at once (default 3), as in the sampler. Waiting blocks take memory too.",
        ),
        io.Float.Input(
            "budget",
            default=0.0,
            min=0.0,
            max=1024.0,
            step=0.1,
            tooltip=(
                "Memory for the cache in GB. 0 (default): what the graphics card has free when this node runs, less "
                "the model; without a card, the computer's memory."
            ),
        ),
        io.Boolean.Input(
            "guidance",
            default=False,
            optional=True,
            tooltip=(
                "On when the guider's cfg is not 1: the negative prompt then has a cache of its own, and the whole "
                "takes twice as much. Off (default) for distilled models."
            ),
        ),
    ]

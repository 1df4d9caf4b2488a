"""LongCat Scheduler: the noise levels that LongCat-Video is sampled with, at the shift of the loaded checkpoint."""

from __future__ import annotations

from comfy_api.latest import io

from ..world_models import longcat
from .sockets import CATEGORY

STANDARD, FINE, DISTILLED = "standard", "fine ending", "distilled"
STANDARD_STEPS = 50
AUTOMATIC = 0


class QuantWMLongCatScheduler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMLongCatScheduler",
            display_name="LongCat Scheduler",
            category=CATEGORY,
            description=(
                "The noise levels of LongCat-Video for Sampler Custom (Advanced), with the shift that the checkpoint "
                "asks for. Use it with the euler sampler."
            ),
            search_aliases=["quantwm", "longcat", "sigmas", "scheduler", "distilled"],
            inputs=[
                io.Model.Input("model", tooltip="LongCat-Video. Its shift is shown by Load World Model."),
                io.Combo.Input(
                    "schedule",
                    options=[STANDARD, FINE, DISTILLED],
                    default=STANDARD,
                    tooltip=(
                        "standard (default): evenly spaced before the shift, cfg 4.\n"
                        "fine ending: ten even steps in place of the last ones, as the published continuation; 50 "
                        "steps become 56.\n"
                        "distilled: for the distillation LoRA, 16 steps, cfg 1."
                    ),
                ),
                io.Int.Input(
                    "steps",
                    default=AUTOMATIC,
                    min=AUTOMATIC,
                    max=1000,
                    tooltip="0 (default): as published, 50, or 16 where distilled.",
                ),
            ],
            outputs=[io.Sigmas.Output("sigmas", display_name="sigmas", tooltip="The noise levels.")],
        )

    @classmethod
    def execute(cls, model, schedule: str, steps: int) -> io.NodeOutput:
        shift = getattr(model.get_model_object("model_sampling"), "shift", None)
        if shift is None:
            raise ValueError(
                f"LongCat Scheduler needs a model with a shift of its noise levels; this is "
                f"{type(model.model).__name__}. Load LongCat-Video with Load World Model."
            )
        if schedule == DISTILLED:
            return io.NodeOutput(longcat.distilled_sigmas(steps or longcat.DISTILLED_STEPS, shift))
        return io.NodeOutput(longcat.sigmas(steps or STANDARD_STEPS, shift, fine_ending=schedule == FINE))

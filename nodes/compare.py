"""Compare Worlds: how far one video is from another, as numbers, curves and pictures."""

from __future__ import annotations

import comfy.model_management
import comfy.utils
import torch
from comfy_api.latest import io, ui

from ..quantwm_core.comparison import check_comparable, compare, comparison_report
from .charts import chart_tensor
from .comparison_chart import comparison_chart
from .perceptual import lpips_scorer
from .progress import show_text
from .side_by_side import SideBySide
from .sockets import CATEGORY


class QuantWMCompare(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMCompare",
            display_name="Compare Worlds",
            category=CATEGORY,
            description=(
                "Measures how far one video is from another of the same seed, frame by frame: PSNR, SSIM and "
                "flicker, as text, as a chart, and as a video of both with their difference."
            ),
            search_aliases=["psnr", "ssim", "lpips", "flicker", "video quality", "side by side", "difference"],
            inputs=_inputs(),
            outputs=[
                io.String.Output("report", display_name="report", tooltip="The numbers as text, then as JSON."),
                io.Image.Output("chart", display_name="chart", tooltip="Curves over frames, for Save Image."),
                io.Image.Output(
                    "side_by_side",
                    display_name="side by side",
                    tooltip="Both videos and their difference, for Create Video.",
                ),
                io.Float.Output("psnr", display_name="psnr", tooltip="In dB over all pixels; 100 where all is equal."),
                io.Float.Output("ssim", display_name="ssim", tooltip="Mean over frames; 1 where all is equal."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls,
        reference: torch.Tensor,
        compared: torch.Tensor,
        difference_gain: float,
        reference_name: str,
        compared_name: str,
    ) -> io.NodeOutput:
        check_comparable(reference, compared)
        node_id = cls.hidden.unique_id if cls.hidden else None
        names = (reference_name.strip() or "reference", compared_name.strip() or "compared")
        frames = min(len(reference), len(compared))
        sheet = SideBySide(frames, reference.shape[2], reference.shape[1], names, difference_gain)
        progress = comfy.utils.ProgressBar(frames, node_id)

        def on_frame(index: int, first: torch.Tensor, second: torch.Tensor, psnr: float) -> None:
            comfy.model_management.throw_exception_if_processing_interrupted()
            sheet.add(index, first, second, psnr)
            progress.update_absolute(index + 1)

        lpips, reason = lpips_scorer(reference)
        result = compare(reference, compared, lpips, on_frame)
        report = comparison_report(result, names, reason)
        chart = chart_tensor(comparison_chart(result, names))
        # The report ends in JSON: for scripts, not for the node.
        show_text(report.partition("\n{")[0], node_id)
        preview = ui.PreviewImage(chart, cls=cls).as_dict() | ui.PreviewText(report).as_dict()
        return io.NodeOutput(report, chart, sheet.images, result.psnr_total, result.ssim_mean, ui=preview)


def _inputs() -> list[io.Input]:
    return [
        io.Image.Input(
            "reference",
            tooltip=(
                "The frames to measure against: the run with method off, or with more bits. Same size, seed and "
                "prompt as the other one."
            ),
        ),
        io.Image.Input(
            "compared",
            tooltip=(
                "The frames to measure. If one video is longer, the frames that both have are compared and the "
                "report says so; different sizes are refused."
            ),
        ),
        io.Float.Input(
            "difference_gain",
            default=4.0,
            min=1.0,
            max=64.0,
            step=0.5,
            tooltip=(
                "How strongly the difference is shown in the side-by-side video; 4 is the default. It changes no "
                "number. Raise it to see faint errors, lower it if all is white."
            ),
        ),
        io.String.Input(
            "reference_name",
            default="reference",
            tooltip="What the reference is called in report, chart and video, e.g. full precision.",
        ),
        io.String.Input(
            "compared_name",
            default="compared",
            tooltip="What the compared video is called in report, chart and video, e.g. 2 bits.",
        ),
    ]

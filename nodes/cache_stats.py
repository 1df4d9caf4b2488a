"""Cache Memory Stats: what the last run stored, as text on the node, a STRING and a chart."""

from __future__ import annotations

from comfy_api.latest import io, ui

from ..quantwm_core.accounting import format_report
from .charts import chart_tensor, memory_chart
from .live import OUTPUT, panel_state, watched
from .progress import show_text
from .sockets import CATEGORY, CacheSocket


class QuantWMCacheStats(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMCacheStats",
            display_name="Cache Memory Stats",
            category=CATEGORY,
            description=(
                "Shows what the KV cache of the last run took, part by part, against plain BF16. Counted "
                "from the tensors that really existed."
            ),
            search_aliases=[
                "kv cache memory",
                "vram usage",
                "memory report",
                "cache chart",
                "compression ratio",
            ],
            inputs=[
                CacheSocket.Input("cache", tooltip="From Apply To World Model."),
                io.MultiType.Input(
                    "after",
                    types=[io.Latent, io.Image],
                    optional=True,
                    tooltip=(
                        "Anything made by the sampling run: the sampler's latent, or the decoded images. It "
                        "is not read; it makes this node wait until the run is over. Leave it open only to "
                        "see an earlier run."
                    ),
                ),
            ],
            outputs=[
                io.String.Output("report", display_name="report", tooltip="The numbers as plain text."),
                io.Image.Output("chart", display_name="chart", tooltip="The chart, for Save Image."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, cache, after=None) -> io.NodeOutput:
        report = format_report(cache)
        chart = chart_tensor(memory_chart(cache.record, cache.history))
        if not watched():
            # The report ends in the record as JSON: for scripts, not for the node.
            show_text(report.partition("\n{")[0], cls.hidden.unique_id if cls.hidden else None)
        # ComfyUI draws `text` only on its own preview nodes; it is here for clients of the HTTP API.
        preview = ui.PreviewImage(chart, cls=cls).as_dict() | ui.PreviewText(report).as_dict()
        return io.NodeOutput(report, chart, ui=preview | {OUTPUT: [panel_state(cache)]})

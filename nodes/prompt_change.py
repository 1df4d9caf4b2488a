"""Prompt Change: another prompt from a later block on; chain several for a schedule."""

from __future__ import annotations

from comfy_api.latest import io

from ..world_models.causal_wan.sampler import PromptChange
from .sockets import CATEGORY, PromptsSocket


class QuantWMPromptChange(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMPromptChange",
            display_name="Prompt Change",
            category=CATEGORY,
            description=(
                "Changes the prompt while a world model makes its video. The guider's prompt is the first one; this "
                "one takes over from a block that you choose. Chain several nodes for several changes."
            ),
            search_aliases=["quantwm", "prompt schedule", "prompt travel", "interactive video", "scene change"],
            inputs=[
                io.Conditioning.Input(
                    "conditioning",
                    tooltip="The new prompt, from CLIP Text Encode or Tiny World Conditioning.",
                ),
                io.Int.Input(
                    "from_block",
                    default=2,
                    min=1,
                    max=4096,
                    tooltip=(
                        "The first block made with it. Blocks count from 1, as World Sampler shows them while it "
                        "runs; given first frames are not counted. 2 (default) is the second one."
                    ),
                ),
                PromptsSocket.Input(
                    "earlier",
                    optional=True,
                    tooltip="Another Prompt Change, to have both. Their order does not matter.",
                ),
            ],
            outputs=[PromptsSocket.Output("prompts", display_name="prompts", tooltip="For World Sampler.")],
        )

    @classmethod
    def execute(cls, conditioning, from_block: int, earlier=()) -> io.NodeOutput:
        if any(change.block == from_block for change in earlier or ()):
            raise ValueError(
                f"from_block must differ between chained Prompt Change nodes; {from_block} is given twice. Change one."
            )
        return io.NodeOutput((*(earlier or ()), PromptChange(from_block, conditioning)))

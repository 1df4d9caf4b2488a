"""World Memory: what a world model remembers beyond the sampler's window."""

from __future__ import annotations

from comfy_api.latest import io

from ..quantwm_core.memory import RETRIEVALS, MemorySettings
from ..quantwm_core.settings import CACHE_DEVICES
from .sockets import CATEGORY, MemorySocket


class QuantWMMemory(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMMemory",
            display_name="World Memory",
            category=CATEGORY,
            description=(
                "Keeps blocks that have left World Sampler's window in a bank and brings those back that show what "
                "is about to be seen again. Memory on the graphics card stays constant, and places that come back "
                "are remembered (WorldKV)."
            ),
            search_aliases=["quantwm", "worldkv", "retrieval", "long term memory", "revisit", "context as memory"],
            inputs=[
                io.Combo.Input(
                    "retrieval",
                    options=list(RETRIEVALS),
                    default="camera",
                    tooltip=(
                        "How blocks are found again.\n"
                        "camera (default): those whose camera looked most like the coming block's. The prompt has to "
                        "say how the camera moves, as LingBot Conditioning and Tiny World Conditioning do.\n"
                        "similarity: those whose keys fit the coming block's queries; any model, with Apply To World "
                        "Model.\n"
                        "off: none; for compression alone."
                    ),
                ),
                io.Int.Input(
                    "blocks",
                    default=6,
                    min=1,
                    max=256,
                    tooltip="How many blocks come back for each new one (default 6). More remember more and cost time.",
                ),
                io.Int.Input(
                    "bank_blocks",
                    default=0,
                    min=0,
                    max=4096,
                    tooltip=(
                        "How many blocks the bank holds. 0 (default) is all of them. Otherwise a block goes when a "
                        "newer one shows the same view, and memory is constant however long the video gets."
                    ),
                ),
                io.Float.Input(
                    "keep",
                    default=1.0,
                    min=0.05,
                    max=1.0,
                    step=0.05,
                    tooltip=(
                        "Share of each block's tokens, after its first frame, that is stored at all. 1 (default) is "
                        "everything; 0.5 leaves out the half that the first frame shows already."
                    ),
                ),
                io.Combo.Input(
                    "bank_device",
                    options=list(reversed(CACHE_DEVICES)),
                    default="cpu",
                    advanced=True,
                    tooltip=(
                        "Where the bank lives. cpu (default) keeps graphics memory constant. gpu saves the way back, "
                        "which is short for packed blocks."
                    ),
                ),
            ],
            outputs=[MemorySocket.Output("memory", display_name="memory", tooltip="For World Sampler.")],
        )

    @classmethod
    def execute(cls, **settings) -> io.NodeOutput:
        return io.NodeOutput(MemorySettings(**settings))

"""World Sampler: the autoregressive sampler with a window, context noise and prompts that change on the way."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..quantwm_core.window import MAX_FRAMES_PER_BLOCK, SOLVERS, RolloutSettings
from ..world_models.causal_wan.sampler import WorldSampler
from .progress import rollout_text, show_text
from .sockets import CATEGORY, MemorySocket, PromptsSocket

_MAX_FRAMES = 4096


class QuantWMWorldSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMWorldSampler",
            display_name="World Sampler",
            category=CATEGORY,
            description=(
                "Samples an autoregressive video model block by block. It takes the place of Sampler AR Video and "
                "gives the same result until you ask for more: a window that keeps memory constant for videos of "
                "any length, prompts that change on the way, context noise."
            ),
            search_aliases=[
                "quantwm",
                "sampler ar video",
                "autoregressive sampler",
                "long video",
                "rolling window",
                "attention sink",
                "prompt schedule",
            ],
            inputs=[
                io.Int.Input(
                    "frames_per_block",
                    default=3,
                    min=1,
                    max=MAX_FRAMES_PER_BLOCK,
                    tooltip=(
                        "Latent frames made at once. It has to be what the model was trained for: 1 for framewise "
                        "checkpoints, 3 (default) for chunkwise ones and the tiny world."
                    ),
                ),
                io.Int.Input(
                    "window",
                    default=0,
                    min=0,
                    max=_MAX_FRAMES,
                    tooltip=(
                        "How many of the newest latent frames the model looks back at. 0 (default): all, so memory and "
                        "time grow with the video. Otherwise older blocks are dropped and both stay constant. Whole "
                        "blocks count; at least frames_per_block."
                    ),
                ),
                io.Int.Input(
                    "sink",
                    default=0,
                    min=0,
                    max=_MAX_FRAMES,
                    tooltip=(
                        "First latent frames that are never dropped, beside the window (default 0). 3 keeps long "
                        "videos from drifting away from their start. Only with a window."
                    ),
                ),
                io.Float.Input(
                    "context_noise",
                    default=0.0,
                    min=0.0,
                    max=0.99,
                    step=0.01,
                    advanced=True,
                    tooltip=(
                        "Noise level at which a finished block is shown to the model to be remembered. 0 (default) as "
                        "in ComfyUI's sampler. A little, such as 0.05, can slow drift in models trained with it."
                    ),
                ),
                PromptsSocket.Input(
                    "prompts",
                    optional=True,
                    tooltip=(
                        "From Prompt Change: other prompts from later blocks on. The guider's prompt is the first one."
                    ),
                ),
                MemorySocket.Input(
                    "memory",
                    optional=True,
                    tooltip="From World Memory: blocks that left the window come back when they are needed.",
                ),
                io.Combo.Input(
                    "solver",
                    options=list(SOLVERS),
                    default=SOLVERS[0],
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "How a block gets from one noise level to the next.\n"
                        "automatic (default): as LingBot Conditioning's version says; few-step without it.\n"
                        "few-step: new noise on each step's finished picture, for distilled models.\n"
                        "unipc: along one path, for models that are not distilled: 20 to 50 steps, cfg about 5."
                    ),
                ),
            ],
            outputs=[
                io.Sampler.Output("sampler", display_name="SAMPLER", tooltip="For Sampler Custom (Advanced)."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, window: int | None = None, frames_per_block: int | None = None) -> bool | str:
        # Inputs named here lose ComfyUI's own check of their range, so both are checked in full; None is linked.
        known = {"window": window, "frames_per_block": frames_per_block}
        try:
            RolloutSettings(**{name: value for name, value in known.items() if value is not None})
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        frames_per_block: int,
        window: int,
        sink: int,
        context_noise: float,
        prompts=(),
        memory=None,
        solver: str = SOLVERS[0],
    ) -> io.NodeOutput:
        settings = RolloutSettings(frames_per_block, window, sink, context_noise, solver)
        own_id = cls.hidden.unique_id if cls.hidden else None

        def on_block(entry: dict[str, Any]) -> None:
            # The node that runs shows what the cache takes; this one shows how far the video is.
            show_text(rollout_text(entry), own_id)

        return io.NodeOutput(WorldSampler(settings, prompts or (), on_block, memory))

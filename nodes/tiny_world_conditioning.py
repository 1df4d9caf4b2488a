"""Tiny World Conditioning: how the camera moves, in place of a text prompt."""

from __future__ import annotations

from comfy_api.latest import io

from ..world_models import tiny_world
from .sockets import CATEGORY


def motion_inputs() -> list[io.Input]:
    """The three inputs that describe a camera motion; both nodes of a graph must be given the same values."""
    slow, fast = tiny_world.TURN_RATE_RANGE
    closest, widest = tiny_world.ORBIT_RANGE
    return [
        io.Float.Input(
            "turn_rate",
            default=18.0,
            min=-fast,
            max=fast,
            step=0.5,
            tooltip=(
                f"How far the camera turns each frame, in degrees: {slow:g} to {fast:g}, negative for the "
                "other way. 18 (default) makes a full turn in 20 frames. Give Tiny World Seed and Tiny World "
                "Conditioning the same value."
            ),
        ),
        io.Float.Input(
            "orbit",
            default=0.2,
            min=closest,
            max=widest,
            step=0.01,
            tooltip=(
                "Radius of the circle that the camera walks while it turns; the room is 4 wide. 0 turns on "
                "the spot, 0.2 is the default. Same value in both nodes."
            ),
        ),
        io.Float.Input(
            "orbit_phase",
            default=0.0,
            min=0.0,
            max=360.0,
            step=1.0,
            tooltip="Where on its circle the camera starts, in degrees (default 0). Same in both nodes.",
        ),
    ]


class TinyWorldConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantWMTinyWorldConditioning",
            display_name="Tiny World Conditioning",
            category=CATEGORY,
            description=(
                "Tells the tiny world's model how the camera moves. It takes the place of a text prompt: "
                "connect it as the positive conditioning of the guider. The tiny world ignores text."
            ),
            search_aliases=["quantwm", "tiny world", "camera", "prompt", "turn rate", "orbit"],
            inputs=motion_inputs(),
            outputs=[
                io.Conditioning.Output(
                    "conditioning",
                    display_name="CONDITIONING",
                    tooltip="Positive conditioning for the guider.",
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, turn_rate: float | None = None, orbit: float | None = None) -> bool | str:
        return motion_error(turn_rate, orbit)

    @classmethod
    def execute(cls, turn_rate: float, orbit: float, orbit_phase: float) -> io.NodeOutput:
        tokens = tiny_world.conditioning(turn_rate, orbit, orbit_phase)
        return io.NodeOutput([[tokens, {"camera_motion": (turn_rate, orbit, orbit_phase)}]])


def motion_error(turn_rate: float | None, orbit: float | None) -> bool | str:
    """True, or what is wrong with the camera motion; a linked value is not known yet and passes here."""
    if turn_rate is None or orbit is None:
        return True
    try:
        tiny_world.check_motion(turn_rate, orbit)
    except ValueError as error:
        return str(error)
    return True

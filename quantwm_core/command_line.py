"""`python -m quantwm_core`: plan a run's memory, look into a saved span; needs neither ComfyUI nor Triton."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from .cache import CacheGeometry
from .inspection import format_span, inspect_file
from .plan_table import GB, World, format_plan, make_plan, require_choice

# Shapes of the public configurations.
MODELS = {
    "causal-forcing": CacheGeometry(30, 12, 128),
    "lingbot-14b": CacheGeometry(40, 40, 128),
    "lingbot-1.3b": CacheGeometry(30, 12, 128),
    "longcat": CacheGeometry(48, 32, 128),
}
# Their given frames fill the cache in one forward.
PREFILLED = ("longcat",)
# Pixels a token covers in each direction: Wan's VAE makes 8 to one, the network's patches two to one.
TOKEN_PIXELS = 16

PLAN_EXAMPLES = """examples:
  python -m quantwm_core plan --width 832 --height 480 --length 93 --budget 2
  python -m quantwm_core plan --model lingbot-14b --length 69 --block 4 --budget 12
  python -m quantwm_core plan --model longcat --length 73 --block 19
  python -m quantwm_core plan --layers 48 --heads 32 --head-dim 128 --length 77 --block 19
"""
INSPECT_EXAMPLES = """example:
  python -m quantwm_core inspect span.safetensors
"""
BENCHMARKS = """Benchmarks lie beside this package, in the repository's root:
  python -m benchmarks.memory --quick      bytes of each model's cache, from real encodings
  python -m benchmarks.quality --quick     quality of pictures on the tiny world
  python -m benchmarks.encode              speed of encoding, on a GPU
  python -m benchmarks.generate            whole runs in a real ComfyUI
Each has --help.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; errors go to standard error in one line. Returns the exit status, 0 for success."""
    options = _parser().parse_args(arguments)
    try:
        text = options.run(options)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(text.rstrip("\n") + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quantwm_core",
        description="A world model's KV cache in few bits: plan its memory, look into what was saved.",
        epilog=PLAN_EXAMPLES + INSPECT_EXAMPLES.partition("\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan = _command(commands, "plan", "what a cache takes with each method, and what fits a budget", PLAN_EXAMPLES)
    plan.set_defaults(run=_plan)
    plan.add_argument("--model", choices=MODELS, default="causal-forcing", help="shape of the cache (%(default)s)")
    for name in ("layers", "heads", "head-dim"):
        plan.add_argument(f"--{name}", type=int, help="of another model, in place of --model's")
    plan.add_argument("--width", type=int, default=832, help="pixels (%(default)s)")
    plan.add_argument("--height", type=int, default=480, help="pixels (%(default)s)")
    plan.add_argument("--length", type=int, default=81, help="frames of the video (%(default)s)")
    plan.add_argument("--block", type=int, default=3, help="latent frames made at once (%(default)s)")
    plan.add_argument("--guidance", action="store_true", help="cfg is not 1: the negative prompt has a cache as well")
    plan.add_argument("--budget", type=float, help="memory for the cache in GB of 2**30 bytes; chooses what fits")
    inspect = _command(commands, "inspect", "method, bits, tokens and parts of a saved span", INSPECT_EXAMPLES)
    inspect.set_defaults(run=lambda options: format_span(inspect_file(options.file)))
    inspect.add_argument("file", metavar="FILE", help="safetensors file of PackedSpan.to_savable()")
    bench = _command(commands, "bench", "where the benchmarks are", BENCHMARKS)
    bench.set_defaults(run=lambda options: BENCHMARKS)
    return parser


def _command(commands, name: str, what: str, epilog: str) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(name, help=what, description=what, epilog=epilog, formatter_class=raw)


def _plan(options: argparse.Namespace) -> str:
    for name in ("layers", "heads", "head_dim", "width", "height"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}. Raise --{name.replace('_', '-')}.")
    known = MODELS[options.model]
    geometry = CacheGeometry(
        options.layers or known.layers, options.heads or known.heads, options.head_dim or known.head_dim
    )
    tokens = -(-options.width // TOKEN_PIXELS) * -(-options.height // TOKEN_PIXELS)
    budget = options.budget
    if budget is not None and not 0 < budget < math.inf:
        raise ValueError(f"budget must be more than 0 GB and a number; got {budget}. Change --budget.")
    budget = None if budget is None else round(budget * GB)
    prefilled = options.model in PREFILLED
    world = World(geometry, tokens, prefilled=prefilled).guided(options.guidance)
    plan = make_plan(world, options.length, options.block, budget)
    if budget is not None:
        require_choice(plan)
    return format_plan(plan)

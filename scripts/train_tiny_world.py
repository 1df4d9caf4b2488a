"""Train the tiny world that comes with the pack: codec, world model, four-step student.

    python scripts/train_tiny_world.py --out DIR [--minutes 8] [--quick] [--resume DIR] [--compare DIR] [--dump]

Needs a ComfyUI checkout (COMFYUI_PATH, or the one that scripts/setup fetched). Writes world.safetensors,
codec.safetensors, world_teacher.safetensors, train.log and preview.png (true frames above generated ones)
into DIR, and prints what they are worth. --resume goes on from such a folder. Several GPUs share the world's
half of the work, after one has made the codecs:

    python scripts/train_tiny_world.py --out DIR --only codecs
    torchrun --nproc_per_node 2 scripts/train_tiny_world.py --out DIR --only worlds

Eight minutes are meant for an H200; --quick only walks through the code, in about a minute on two cores.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--minutes", type=float, default=8.0, help="training time without start-up and evaluation")
    parser.add_argument("--resume", type=Path, help="folder of an earlier run to start from")
    parser.add_argument("--only", choices=("codecs", "worlds"), help="half of the training; default: all of it")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the code")
    parser.add_argument("--compare", type=Path, help="folder with world and codec weights to measure too")
    parser.add_argument("--dump", action="store_true", help="also write queries, keys and values of one rollout")
    parser.add_argument("--no-compile", action="store_true", help="run everything without torch.compile")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    import torch

    from training.tiny_world import pipeline, ranks

    if ranks.world_size() > 1 and arguments.only != "worlds":
        raise SystemExit("Several processes train only the world. Run --only codecs first, in one process.")
    _log_to(arguments.out / f"{arguments.only or 'train'}.log", quiet=ranks.rank() > 0)
    device = ranks.start()
    torch.manual_seed(ranks.rank())
    torch.set_float32_matmul_precision("high")
    plan = _plan(arguments)
    if arguments.only != "worlds":
        pipeline.train_codecs(plan, arguments.out, device, arguments.resume)
    if arguments.only != "codecs":
        compiled = device.type == "cuda" and not arguments.no_compile
        pipeline.train_worlds(plan, arguments.out, device, arguments.resume, compiled)
    ranks.stop()
    if arguments.only == "codecs" or ranks.rank() != 0:
        return
    print(pipeline.report(plan, arguments.out, arguments.compare), flush=True)
    if arguments.dump:
        pipeline.dump_cache(plan, arguments.out)


def _plan(arguments: argparse.Namespace):
    from training.tiny_world.plan import Plan

    if arguments.quick:
        return Plan.quick()
    return Plan.resumed(arguments.minutes) if arguments.resume else Plan.full(arguments.minutes)


def _log_to(path: Path, quiet: bool) -> None:
    """Progress to the screen and a file; of several processes only the first has anything to say."""
    to_file = [] if quiet else [logging.FileHandler(path, mode="w")]
    logging.basicConfig(
        level=logging.WARNING if quiet else logging.INFO,
        format="%(relativeCreated)7d ms %(message)s",
        handlers=[logging.StreamHandler(sys.stdout), *to_file],
        force=True,
    )


if __name__ == "__main__":
    main()

"""Whole generations in the real ComfyUI: time, peak memory and resident cache against the host without this pack.

    python -m benchmarks.generate [--json FILE] [--quick] [--model NAME] [--blocks N ...] [--methods NAME ...]
                                  [--runs N] [--profile FOLDER]

Random weights in the shape of Causal-Forcing (93 frames of 832 x 480, 4 steps) or of LingBot-World v2 1.3B (189 frames,
so that its window rolls from the fifth block of 12 on), or in LongCat-Video's width with 4 layers (a continuation of 73
frames by 20, guided, 4 steps; `block` is what is made). Rows of one block size belong together:

    native           the host alone
    native, cudnn    the host alone with torch's attention limited to cuDNN, the most that a faster attention can bring
    off              this pack attached, method off; "offloaded": its cache on the CPU, a layer copied when it attends
    quantwm          backend auto; "host attention" keeps the attention that native uses; "torch" has no kernels at all
    others           the same backend auto

`first_seconds` is a run that loads, and compiles what is not found on disk; `seconds` the best of those after it.
Before each of these native runs once, and `ratio_to_native` is to the best of them, because a machine slows down as it
gets warm. `seconds_per_step` (LongCat-Video) is what a step adds, its prefill left out. `peak_gib_without_weights` is
what the run allocates beyond the loaded weights. `repeatable` says whether all runs with one seed gave the same bits.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from . import random_lingbot, random_longcat, random_wan
from .bare_pack import bare_module
from .random_wan import WanShape
from .report import parser, print_table, write_json
from .variants import Variant, variants

COLUMNS = (
    "model frames block method variant first_seconds seconds seconds_per_step ratio_to_native peak_gib_without_weights "
    "ratio_peak resident_gib ratio_resident repeatable backend"
).split()
STEPS = 4
GIB = 2**30


@dataclass(frozen=True)
class Subject:
    """A model to measure: where it comes from, its shape, a small one for CPUs, and the blocks it is sampled in.

    per_step: whether to time a step apart from what comes before the first.
    """

    source: ModuleType
    shape: WanShape
    small: WanShape
    blocks: tuple[int, ...]
    variants: Callable[[bool], Iterator[Variant]] = variants
    per_step: bool = False


SUBJECTS = {
    "causal-forcing": Subject(random_wan, random_wan.CAUSAL_FORCING, random_wan.SMALL, (3, 1)),
    "lingbot-v2-1.3b": Subject(random_lingbot, random_lingbot.LINGBOT, random_lingbot.SMALL, (4,)),
    "longcat": Subject(
        random_longcat, random_longcat.LONGCAT, random_longcat.SMALL, (5,), random_longcat.variants, per_step=True
    ),
}


def attach(variant: Variant, model):
    """The model as the variant samples it, and the handle of its runs (None for native)."""
    if variant.method == "native":
        return model, None
    settings = bare_module("quantwm_core").CacheSettings(method=variant.method, **variant.settings)
    return bare_module("world_models").attach(model, settings)


def measure(
    variant: Variant, subject: Subject, model, shape: WanShape, block: int, device: torch.device, runs: int
) -> dict:
    """One row, without its ratio of peaks, from `runs` timed runs."""
    native = partial(subject.source.sample, model, shape, block, STEPS)
    model, handle = attach(variant, model)
    run = partial(subject.source.sample, model, shape, block, STEPS)
    seconds, beside, peaks, latents = [], [], [], []
    for turn in range(1 + (1 if variant.once else runs)):
        if turn and variant != Variant("native"):
            beside.append(timed(native, device)[1])
        with variant.around():
            latent, elapsed, peak = timed(run, device)
        latents.append(latent)
        seconds.append(elapsed)
        peaks.append(peak)
    with variant.around():
        step = _step_seconds(subject, model, shape, block, device, min(seconds[1:])) if subject.per_step else None
    record = handle.record if handle else None
    resident = _resident(record) if record else native_bytes(shape)
    return {
        "model": shape.name,
        "frames": shape.video_frames,
        "block": block,
        "method": variant.method,
        "variant": variant.name,
        "seconds": min(seconds[1:]),
        "seconds_per_step": step,
        "first_seconds": seconds[0],
        "seconds_each": seconds,
        "native_seconds_each": beside,
        "ratio_to_native": min(seconds[1:]) / min(beside or seconds[1:]),
        "peak_gib_without_weights": peaks[-1] / GIB if device.type == "cuda" else None,
        "resident_gib": resident / GIB,
        "ratio_resident": native_bytes(shape) / resident,
        "repeatable": all(torch.equal(latents[1], latent) for latent in latents[2:]),
        "like_first_run": torch.equal(latents[0], latents[1]),
        "finite": bool(latents[0].isfinite().all()),
        "backend": record["backend"] if record else "host",
        "backend_reason": record["backend_reason"] if record else "",
        "encode_seconds": record["encode_seconds"] if record else None,
        "decode_seconds": record["decode_seconds"] if record else None,
    }


def _step_seconds(subject: Subject, model, shape: WanShape, block: int, device: torch.device, whole: float) -> float:
    """Seconds that a step adds: a run of all steps took `whole`."""
    one = min(timed(partial(subject.source.sample, model, shape, block, 1), device)[1] for _ in range(2))
    return (whole - one) / (STEPS - 1)


def timed(run: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, float, int]:
    """Result, seconds and the most bytes that the run held beyond what was there before it."""
    gc.collect()
    before = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    result = run()
    if device.type != "cuda":
        return result, time.perf_counter() - started, 0
    torch.cuda.synchronize()
    return result, time.perf_counter() - started, torch.cuda.max_memory_allocated() - before


def native_bytes(shape: WanShape) -> int:
    """The cache without packing: keys and values of all tokens that it holds in bf16."""
    frames = min(shape.frames, shape.window or shape.frames)
    tokens = frames * (shape.height // 2) * (shape.width // 2)
    return 4 * shape.layers * shape.dim * tokens


def _resident(record: dict) -> int:
    return record["bytes_packed"] + record["bytes_unpacked"] + record["bytes_state"]


def profile(variant: Variant, subject: Subject, model, shape: WanShape, block: int, folder: Path) -> None:
    """Write where the GPU's time of one run goes, by kernel, to a text file."""
    model, _ = attach(variant, model)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with variant.around(), torch.profiler.profile(activities=activities) as profiler:
        subject.source.sample(model, shape, block, STEPS)
        torch.cuda.synchronize()
    averages = profiler.key_averages()
    orders = ("self_device_time_total", "self_cpu_time_total")
    table = "\n".join(averages.table(sort_by=order, row_limit=45, max_name_column_width=70) for order in orders)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"profile-{variant.method}-{variant.name.replace(' ', '-')}-block{block}.txt"
    (folder / name).write_text(table + "\n", encoding="utf-8")


def main() -> None:
    """Run the benchmark; see the module's text."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--model", choices=list(SUBJECTS), default=next(iter(SUBJECTS)), help="whose shape")
    options.add_argument("--blocks", nargs="+", type=int, metavar="N", help="latent frames of a block")
    options.add_argument("--methods", nargs="+", metavar="NAME", help="only these methods, and native")
    options.add_argument("--runs", type=int, default=3, metavar="N", help="timed runs of a row")
    options.add_argument("--profile", type=Path, metavar="FOLDER", help="also profile runs of native and quantwm")
    arguments = options.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.type == "cuda"
    subject = SUBJECTS[arguments.model]
    shape = subject.small if arguments.quick or not gpu else subject.shape
    model = subject.source.load(shape, device)
    bare_module("kernels")
    rows: list[dict] = []
    for block in arguments.blocks or subject.blocks:
        native = None
        for variant in subject.variants(gpu):
            if variant.method not in ("native", *(arguments.methods or [variant.method])):
                continue
            row = measure(variant, subject, model, shape, block, device, arguments.runs)
            native = native or row
            if gpu:
                row["ratio_peak"] = row["peak_gib_without_weights"] / native["peak_gib_without_weights"]
            rows.append(row)
            print_table(rows[-1:], COLUMNS)
            if arguments.profile and gpu and not variant.once and variant.method in ("native", "quantwm"):
                profile(variant, subject, model, shape, block, arguments.profile)
            # Row by row: what was measured survives a run that is cut short.
            write_json(arguments.json, "benchmarks.generate", rows)
    print()
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()

"""What packing costs in the picture: the tiny world in the real host, each method against full precision.

    python -m benchmarks.quality [--json FILE] [--quick] [--worlds N] [--seeds N] [--given N] [--methods NAME ...]
                                 [--ablations] [--docs FILE] [--from JSON ...] [--workers N]

Each world is given 21 true frames (a whole turn) and goes on for 15; the figures compare those 15 with the rollout on
an uncompressed cache (psnr, ssim, flicker) and with the true views that come back (revisit_psnr). Intervals are 95 %,
over worlds and seeds. top1_shift, logit_mse and attention_error compare attention on the packed cache with attention
on true keys and values, in one more rollout of the first seed that goes on with the true ones (teacher-forced).

--docs writes the tables as a page; with --from it does so from the files of earlier runs, and measures nothing. What a
later file measured again takes the place of what an earlier one has.
--workers shares the rows out among processes, and those among the GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from quantwm_core.picture_metrics import flicker as flicker_between
from quantwm_core.settings import METHODS

from .ablations import ABLATIONS, PAPER, Variant
from .host import load_pack
from .quality_page import write_page
from .report import document, parser, print_table, write_json
from .tiny_rollout import Worlds, prepare, sample

COLUMNS = [
    "method",
    "variant",
    "key_bits",
    "value_bits",
    "bits_per_element",
    "ratio_resident",
    "psnr_mean",
    "psnr_ci95",
    "psnr_min",
    "ssim_mean",
    "flicker",
    "revisit_psnr_mean",
    "top1_shift",
    "logit_mse",
    "attention_error",
    "seconds",
]


VARIANTS = (
    Variant("off"),
    Variant("rtn"),
    Variant("quantwm-paper", "affine + k-means", settings=PAPER, parts={"query_sensitive": False, "correction": False}),
    Variant("quantwm-paper", "+ QSAC", settings=PAPER, parts={"correction": False}),
    Variant("quantwm-paper", "+ PSAC (paper)", settings=PAPER),
    Variant("quantwm"),
    Variant("quantwm", "no feedback", parts={"feedback": False}),
    Variant("quantwm", "rank 8", settings={"rank": 8}),
    Variant("quantwm-paper", "+ PSAC (paper)", 2, 16, PAPER),
    Variant("quantwm-paper", "+ PSAC (paper)", 16, 2, PAPER),
    Variant("quantwm", "default", 2, 16),
    Variant("quantwm", "default", 16, 2),
    Variant("quantwm", "default", 4, 4),
    Variant("rtn", "default", 2, 16),
    Variant("rtn", "default", 16, 2),
    Variant("rtn", "default", 4, 4),
    Variant("quantwm-paper", "+ PSAC (paper)", 4, 4, PAPER),
    # The given frames are one span of 2,016 tokens, for which 8 centroids are too few and the automatic count is 64.
    Variant("quantwm-paper", "automatic centroids"),
    *(
        Variant(method, "default", key_bits, value_bits)
        for method in ("quarot", "kivi", "qvg", "qvg-pro")
        for key_bits, value_bits in ((2, 2), (2, 16), (16, 2), (4, 4))
    ),
    *(
        Variant(method, f"jensen {form}", settings={"jensen": form})
        for method in ("quantwm", "rtn", "kivi", "qvg")
        for form in ("second-order", "exact")
    ),
)
QUICK = (VARIANTS[0], VARIANTS[4], VARIANTS[5])
GIVEN = 21


def build_method(variant: Variant, settings):
    """The method object of a variant; parts are fields of the method's class."""
    methods = load_pack().quantwm_core.methods
    method = methods.build_method(settings)
    return type(method)(settings, **{"name": method.name, **variant.parts}) if variant.parts else method


def measure(variant: Variant, worlds: Worlds, references: list[torch.Tensor]) -> dict:
    """One row over all worlds and seeds; `references` are the frames of the uncompressed rollouts, one per seed."""
    core = load_pack().quantwm_core
    settings = core.CacheSettings(
        method=variant.method, key_bits=variant.key_bits, value_bits=variant.value_bits, **variant.settings
    )
    method = build_method(variant, settings) if settings.compresses else None
    # One seed is enough for shares over so many queries.
    probe = core.probe.LogitProbe(teacher_forced=True)
    if settings.compresses:
        sample(worlds, load_pack().world_models.attach(worlds.model, settings, method=method, probe=probe)[0], 0)
    psnr, ssim, flicker, revisit, seconds = [], [], [], [], []
    for seed, reference in enumerate(references):
        patched, handle = load_pack().world_models.attach(worlds.model, settings, method=method)
        started = time.perf_counter()
        frames = worlds.decode(sample(worlds, patched, seed))
        seconds.append(time.perf_counter() - started)
        psnr += per_world_psnr(frames, reference)
        ssim += per_world_ssim(frames, reference)
        flicker += per_world_flicker(frames, reference)
        revisit += per_world_psnr(frames, worlds.true_frames[:, worlds.seed_frames :])
    record = handle.record
    return {
        "method": variant.method,
        "variant": variant.name,
        "series": variant.series,
        "key_bits": variant.key_bits if settings.compresses else 16,
        "value_bits": variant.value_bits if settings.compresses else 16,
        "bits_per_element": round(bits_per_element(record), 4),
        "ratio_resident": record["ratio_resident"],
        "psnr_mean": _mean(psnr),
        "psnr_ci95": _ci95(psnr),
        "psnr_min": round(min(psnr), 3),
        "ssim_mean": _mean(ssim),
        "ssim_ci95": _ci95(ssim),
        "flicker": _mean(flicker),
        "revisit_psnr_mean": _mean(revisit),
        "revisit_psnr_ci95": _ci95(revisit),
        "top1_shift": round(probe.top1_shift, 4),
        "top1_shift_ci95": _ci95(probe.top1_shift_each()),
        "logit_mse": round(probe.logit_mse, 5),
        "attention_error": round(probe.attention_error, 5),
        "by_head": {name: _rounded(layers) for name, layers in probe.by_head().items()},
        "seconds": round(sum(seconds) / len(seconds), 2),
        "encode_seconds": record["encode_seconds"],
        "decode_seconds": record["decode_seconds"],
        "psnr_each": [round(value, 3) for value in psnr],
    }


def bits_per_element(record: dict) -> float:
    """Bits per scalar of the whole cache; what is not packed counts 16, even where the host computes in float32."""
    scalars = record["bytes_bf16"] / 2
    packed = record["ratio_packed"] * record["bytes_packed"] / 2
    return (8 * record["bytes_packed"] + 16 * (scalars - packed)) / scalars


def per_world_psnr(frames: torch.Tensor, reference: torch.Tensor, ceiling: float = 100.0) -> list[float]:
    """Peak signal-to-noise ratio in dB of each world, over all its frames; equal pictures give the ceiling."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    pairs = zip(frames.float(), reference.to(frames).float())
    return [min(ceiling, float(peak_signal_noise_ratio(a, b, data_range=1.0))) for a, b in pairs]


def per_world_flicker(frames: torch.Tensor, reference: torch.Tensor) -> list[float]:
    """Flicker of each world against its reference in 8-bit levels, mean over its frames."""
    differences = frames.float() - reference.to(frames).float()
    return [flicker_between(world[1:], world[:-1]) for world in differences]


def per_world_ssim(frames: torch.Tensor, reference: torch.Tensor) -> list[float]:
    """Structural similarity of each world, mean over its frames."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    pairs = zip(frames.float().movedim(-1, 2), reference.to(frames).float().movedim(-1, 2))
    return [float(structural_similarity_index_measure(a, b, data_range=1.0)) for a, b in pairs]


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 4)


def _ci95(values: list[float]) -> float:
    """Half width of the 95 % interval of the mean (normal approximation)."""
    if len(values) < 2:
        return math.nan
    return round(1.96 * float(torch.tensor(values).std()) / math.sqrt(len(values)), 4)


def _rounded(table: list[list[float]]) -> list[list[float]]:
    return [[round(value, 5) for value in row] for row in table]


def run(arguments: argparse.Namespace) -> dict:
    """Measure all wanted rows; the document that goes to JSON. It is written after each row, if anywhere."""
    count, seeds = (2, 1) if arguments.quick else (arguments.worlds, arguments.seeds)
    worlds = prepare([1000 + i for i in range(count)], arguments.given)
    # A GPU's first run can differ from all later ones in the last bits.
    sample(worlds, worlds.model, 0)
    references = [worlds.decode(sample(worlds, worlds.model, seed)) for seed in range(seeds)]
    about = {"arguments": _arguments(arguments), "worlds": count, "seeds": seeds, "given": arguments.given}
    rows, measured = [], {}
    for variant in wanted(arguments):
        known = measured.get(variant.measured)
        row = known or measured.setdefault(variant.measured, measure(variant, worlds, references))
        rows.append({**row, "variant": variant.name, "series": variant.series})
        print_table(rows[-1:], COLUMNS)
        # A long run that is cut short keeps what it has.
        write_json(arguments.json, "benchmarks.quality", rows, **about)
    print(f"\n{count} worlds x {seeds} seeds")
    print_table(rows, COLUMNS)
    return document("benchmarks.quality", rows, **about)


def wanted(arguments: argparse.Namespace) -> list[Variant]:
    """The rows asked for, in order; of a worker's part those that it measures."""
    variants = (QUICK if arguments.quick else VARIANTS) + (ABLATIONS if arguments.ablations else ())
    chosen = [v for v in variants if v.method in (arguments.methods or METHODS)]
    part, parts = arguments.part or (1, 1)
    mine = list(dict.fromkeys(v.measured for v in chosen))[part - 1 :: parts]
    return [v for v in chosen if v.measured in mine]


def run_workers(arguments: argparse.Namespace) -> dict:
    """The same document from several processes; their own files stay beside it where it is written."""
    count, gpus = arguments.workers, torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(arguments.json.parent if arguments.json else scratch, f"part-{i + 1}.json") for i in range(count)]
        workers = []
        for i, file in enumerate(files):
            place = {"CUDA_VISIBLE_DEVICES": str(i % gpus)} if gpus > 1 else {}
            words = [*_arguments(arguments).split(), "--part", str(i + 1), str(count), "--json", str(file)]
            command = [sys.executable, "-m", "benchmarks.quality", *words]
            workers.append(subprocess.Popen(command, env=os.environ | place))
        codes = [worker.wait() for worker in workers]
        if any(codes):
            raise SystemExit("benchmarks.quality: a worker failed; what it printed stands above.")
        documents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    joined = documents[0] | {"rows": in_order([row for d in documents for row in d["rows"]], wanted(arguments))}
    if arguments.json:
        arguments.json.write_text(json.dumps(joined, indent=1) + "\n", encoding="utf-8")
    print_table(joined["rows"], COLUMNS)
    return joined


def in_order(rows: list[dict], variants: list[Variant]) -> list[dict]:
    """Rows of several workers in the order of their variants."""

    def place(row: dict) -> int:
        # A row that packs nothing says 16 bits, whatever its variant says.
        same = [v for v in variants if (v.method, v.name, v.series) == (row["method"], row["variant"], row["series"])]
        exact = [v for v in same if (v.key_bits, v.value_bits) == (row["key_bits"], row["value_bits"])]
        return variants.index((exact or same)[0])

    return sorted(rows, key=place)


def _arguments(arguments: argparse.Namespace) -> str:
    """What was asked for on the command line, without names of files."""
    words = ["--quick"] if arguments.quick else [f"--worlds {arguments.worlds}", f"--seeds {arguments.seeds}"]
    words += [] if arguments.given == GIVEN else [f"--given {arguments.given}"]
    words += ["--ablations"] if arguments.ablations else []
    return " ".join(words + (["--methods", *arguments.methods] if arguments.methods else []))


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--worlds", type=int, default=12)
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--given", type=int, default=GIVEN, help="true frames given; 0 generates from nothing")
    options.add_argument("--methods", nargs="+", help="only rows of these methods")
    options.add_argument("--ablations", action="store_true", help="also the rows that take methods apart")
    options.add_argument("--docs", type=Path, metavar="FILE", help="also write the tables as a page, docs/quality.md")
    options.add_argument("--workers", type=int, default=1, help="processes to share the rows out among")
    options.add_argument("--part", type=int, nargs=2, metavar=("I", "N"), help=argparse.SUPPRESS)
    options.add_argument("--from", dest="earlier", nargs="+", type=Path, metavar="JSON", help="measure nothing")
    arguments = options.parse_args()
    if arguments.earlier and not arguments.docs:
        options.error("--from takes rows of earlier runs to write --docs FILE from them; name that file.")
    earlier = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.earlier or ()]
    documents = earlier or [run_workers(arguments) if arguments.workers > 1 else run(arguments)]
    if arguments.docs:
        write_page(arguments.docs, documents)


if __name__ == "__main__":
    main()

"""What packing costs in the picture: the tiny world in the real host, each method against full precision.

    python -m benchmarks.quality [--json FILE] [--quick] [--worlds N] [--seeds N] [--given N] [--methods NAME ...]

Each world is given 21 true frames (a whole turn) and goes on for 15; the figures compare those 15 with the rollout on
an uncompressed cache (psnr, ssim), with the true views that come back (revisit_psnr), and the logits under packed keys
with those under true keys (top1_shift). Intervals are 95 %, over worlds and seeds.
top1_shift is taken on the first seed.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch

from quantwm_core.settings import METHODS

from .host import load_pack
from .report import parser, print_table, write_json
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
    "revisit_psnr_mean",
    "top1_shift",
    "seconds",
]


@dataclass(frozen=True)
class Variant:
    """A row: a method with settings, and for ablations the parts of it that are switched off."""

    method: str
    name: str = "default"
    key_bits: int = 2
    value_bits: int = 2
    settings: dict = field(default_factory=dict)
    parts: dict = field(default_factory=dict)


# Spans here have 288 tokens; eight centroids are as many tokens a centroid as the paper's shortest spans have.
PAPER = {"centroids": 8, "rank": 8}
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
    psnr, ssim, revisit, seconds, shift = [], [], [], [], 0.0
    for seed, reference in enumerate(references):
        # Comparing logits costs as much as the run itself; one seed is enough for a share over so many queries.
        probe = core.probe.LogitProbe() if seed == 0 else None
        patched, handle = load_pack().world_models.attach(worlds.model, settings, method=method, probe=probe)
        started = time.perf_counter()
        frames = worlds.decode(sample(worlds, patched, seed))
        seconds.append(time.perf_counter() - started)
        psnr += per_world_psnr(frames, reference)
        ssim += per_world_ssim(frames, reference)
        revisit += per_world_psnr(frames, worlds.true_frames[:, worlds.seed_frames :])
        shift = probe.top1_shift if probe else shift
    record = handle.record
    return {
        "method": variant.method,
        "variant": variant.name,
        "key_bits": variant.key_bits if settings.compresses else 16,
        "value_bits": variant.value_bits if settings.compresses else 16,
        "bits_per_element": round(bits_per_element(record), 4),
        "ratio_resident": record["ratio_resident"],
        "psnr_mean": _mean(psnr),
        "psnr_ci95": _ci95(psnr),
        "psnr_min": round(min(psnr), 3),
        "ssim_mean": _mean(ssim),
        "revisit_psnr_mean": _mean(revisit),
        "revisit_psnr_ci95": _ci95(revisit),
        "top1_shift": round(shift, 4),
        "seconds": round(sum(seconds) / len(seconds), 2),
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


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--worlds", type=int, default=12)
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--given", type=int, default=21, help="true frames given; 0 generates from nothing")
    options.add_argument("--methods", nargs="+", help="only rows of these methods")
    arguments = options.parse_args()
    count, seeds = (2, 1) if arguments.quick else (arguments.worlds, arguments.seeds)
    worlds = prepare([1000 + i for i in range(count)], arguments.given)
    references = [worlds.decode(sample(worlds, worlds.model, seed)) for seed in range(seeds)]
    rows = []
    wanted = [v for v in (QUICK if arguments.quick else VARIANTS) if v.method in (arguments.methods or METHODS)]
    for variant in wanted:
        rows.append(measure(variant, worlds, references))
        print_table(rows[-1:], COLUMNS)
        # Written after each row: a long run that is cut short keeps what it has.
        write_json(arguments.json, "benchmarks.quality", rows, worlds=count, seeds=seeds)
    print(f"\n{count} worlds x {seeds} seeds")
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()

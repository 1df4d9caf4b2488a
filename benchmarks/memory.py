"""Memory of each model's cache, from tensors that the real encoder packed.

    python -m benchmarks.memory [--json FILE] [--quick]
    python -m benchmarks.memory --whole longcat-480p [--device cuda]

One layer and a few heads of each geometry are encoded from structured random keys and values, and the bytes of the
real storages are scaled to all layers and heads: a layout's size does not depend on the values, apart from the paper's
sparse coefficients, and layers and heads share nothing. `ratio_resident` counts everything alive when the run ends.

--whole packs all layers and heads of one geometry instead, and on a GPU also prints what its allocator counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantwm_core import CacheGeometry, CacheSettings, WorldCache
from quantwm_core.query_stats import second_moment
from quantwm_core.settings import METHODS

from .report import parser, print_table, write_json

COLUMNS = "geometry layout tokens bits_per_element gib_bf16 gib_packed ratio_packed ratio_resident".split()


@dataclass(frozen=True)
class Geometry:
    """A model's cache at the end of a run: blocks of tokens as the model commits them, in a window where it rolls."""

    name: str
    layers: int
    heads: int
    head_dim: int
    blocks: tuple[int, ...]
    paper_span_blocks: int
    window: int = 0
    sink: int = 0

    @property
    def tokens(self) -> int:
        return min(sum(self.blocks), self.window or sum(self.blocks))


# Shapes: the models' public configurations. Paper spans: its own where stated (LongCat: one span; 7,040 tokens at
# width 256 and 9,360 at width 128 in table 9), else the block count that comes closest to them.
GEOMETRIES = (
    Geometry("longcat-480p", 48, 32, 128, (19 * 1560,), 1),
    Geometry("causal-forcing-480p", 30, 12, 128, (3 * 1560,) * 8, 2),
    Geometry("lingbot-v2-480p", 40, 40, 128, (4 * 1560,) * 4 + (2 * 1560,), 1),
    Geometry("lingbot-v2-480p-rolling", 40, 40, 128, (4 * 1560,) * 12, 1, window=18 * 1560, sink=6 * 1560),
    # While codebooks of three ages are in reach, which is as much as there ever are.
    Geometry("lingbot-v2-480p-rolling-8", 40, 40, 128, (4 * 1560,) * 8, 1, window=18 * 1560, sink=6 * 1560),
    Geometry("hy-5b-720p", 30, 24, 256, (4 * 880,) * 4, 2),
    Geometry("matrix-game-2", 30, 12, 128, (3 * 880,) * 8, 4),
)


def structured(tokens: int, heads: int, head_dim: int, generator: torch.Generator) -> torch.Tensor:
    """Keys-like data `[1, S, H, D]` in bf16, on the generator's device: clusters of unequal spread, plus noise."""
    here = {"generator": generator, "device": generator.device}
    spread = torch.logspace(0.5, -0.5, head_dim, device=generator.device)
    centers = torch.randn(heads, 64, head_dim, **here) * spread
    choice = torch.randint(0, 64, (tokens,), **here)
    noise = torch.randn(tokens, heads, head_dim, **here)
    return (centers[:, choice].transpose(0, 1) + 0.5 * noise).unsqueeze(0).bfloat16()


def layouts(geometry: Geometry) -> dict[str, CacheSettings]:
    """The layouts to compare: `paper` and `default` first, then every other method by its name."""
    named = {
        "paper": CacheSettings("quantwm-paper", centroids=256, rank=8, span_blocks=geometry.paper_span_blocks),
        "default": CacheSettings("quantwm"),
    }
    others = [method for method in METHODS if method not in ("quantwm", "quantwm-paper", "off")]
    return named | {method: CacheSettings(method) for method in others}


def measure(geometry: Geometry, layout: str, settings: CacheSettings, heads: int) -> dict:
    """One row: encode `heads` heads of one layer, scale to the whole cache."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(heads, geometry.head_dim, geometry.head_dim, generator=generator)
    cache = WorldCache(
        settings,
        CacheGeometry(1, heads, geometry.head_dim),
        value_metrics=[lambda: mixing @ mixing.transpose(1, 2)],
    )
    layer = cache.layers[0]
    if len(geometry.blocks) == 1 and layer.method.uses_earlier_queries:
        # A prefilled cache is one span; the paper's budget counts its correction, so queries were known before it.
        layer.state.earlier.add(second_moment(structured(2048, heads, geometry.head_dim, generator)))
    for tokens in geometry.blocks:
        if geometry.window and layer.committed + tokens > geometry.window:
            layer.evict(geometry.sink, layer.committed + tokens - geometry.window)
        k, v = (structured(tokens, heads, geometry.head_dim, generator) for _ in range(2))
        queries = structured(min(tokens, 2048), heads, geometry.head_dim, generator)
        layer.append(k, v, queries)
        cache.commit(0)
    record = cache.record()
    scale = geometry.layers * geometry.heads / heads
    return _row(geometry, layout, record, scale, layer.packed_elements()) | {"measured_heads": heads}


def _row(geometry: Geometry, layout: str, record: dict, scale: float, elements: int) -> dict:
    """A row from the record of a cache that holds `elements` packed numbers, sizes times `scale`."""
    return {
        "geometry": geometry.name,
        "layout": layout,
        "tokens": geometry.tokens,
        "bits_per_element": round(8 * record["bytes_packed"] / elements, 4),
        "gib_bf16": round(record["bytes_bf16"] * scale / 2**30, 3),
        "gib_packed": round(record["bytes_packed"] * scale / 2**30, 3),
        "ratio_packed": record["ratio_packed"],
        "ratio_resident": record["ratio_resident"],
        "bytes_by_part": {part: round(count * scale) for part, count in record["bytes_by_part"].items()},
    }


def measure_whole(geometry: Geometry, layout: str, settings: CacheSettings, device: torch.device) -> dict:
    """One row: every layer and head in one block, in BF16 and then packed; GiB by its tensors and by the allocator."""
    generator = torch.Generator(device).manual_seed(0)
    heads, head_dim, (tokens,) = geometry.heads, geometry.head_dim, geometry.blocks
    mixing = torch.randn(heads, head_dim, head_dim, generator=generator, device=device)
    metrics = [lambda: mixing @ mixing.transpose(1, 2)] * geometry.layers
    shape = CacheGeometry(geometry.layers, heads, head_dim)
    cache = WorldCache(settings, shape, device, value_metrics=metrics, prefilled=True)
    before = _allocated(device)
    for layer in cache.layers:
        if layer.method.uses_earlier_queries:
            layer.state.earlier.add(second_moment(structured(2048, heads, head_dim, generator)))
        queries = structured(2048, heads, head_dim, generator)
        layer.append(*(structured(tokens, heads, head_dim, generator) for _ in range(2)), queries)
    in_bf16 = _allocated(device) - before
    for index in range(geometry.layers):
        cache.commit(index)
    packed = _allocated(device) - before
    return _row(geometry, layout, cache.record(), 1, sum(layer.packed_elements() for layer in cache.layers)) | {
        "gib_allocated_bf16": round(in_bf16 / 2**30, 3),
        "gib_allocated_packed": round(packed / 2**30, 3),
    }


def _allocated(device: torch.device) -> int:
    """Bytes in tensors on the GPU, 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--whole", metavar="GEOMETRY", choices=[g.name for g in GEOMETRIES if len(g.blocks) == 1])
    options.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="for --whole")
    options = options.parse_args()
    if options.whole:
        geometry = next(g for g in GEOMETRIES if g.name == options.whole)
        rows = [
            measure_whole(geometry, layout, settings, options.device)
            for layout, settings in list(layouts(geometry).items())[:2]
        ]
        columns = [*COLUMNS, "gib_allocated_bf16", "gib_allocated_packed"]
        print_table(
            [row | {name: f"{row[name]:.3f}" for name in columns if name[:3] == "gib"} for row in rows], columns
        )
        write_json(options.json, "benchmarks.memory --whole", rows)
        return
    heads = 1 if options.quick else 2
    rows = []
    for geometry in GEOMETRIES:
        for layout, settings in layouts(geometry).items():
            rows.append(measure(geometry, layout, settings, heads))
    print(f"one layer, {heads} head(s) encoded and scaled to the whole model")
    print_table(rows, COLUMNS)
    write_json(options.json, "benchmarks.memory", rows)


if __name__ == "__main__":
    main()

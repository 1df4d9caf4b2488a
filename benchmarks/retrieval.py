"""What a window, a bank of older blocks and 2 bits do to a long rollout of the tiny world, against keeping everything.

    python -m benchmarks.retrieval [--json FILE] [--quick] [--worlds N] [--frames N] [--variants NAME ...]

Each world is given 21 true frames (a whole turn) and goes on to 200 frames, nine more turns, so every view comes back.
revisit_psnr compares the generated frames with the true views; revisit_last only the last 60 of them. Bytes count keys
and values as BF16 where the CPU computes in float32: `reach_*` is what a block can look back at (what a GPU has to
hold), `bank_*` what lies beside it. Growth compares the end of the run with the moment after the window had filled.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from .host import load_pack
from .quality import per_world_psnr
from .report import parser, print_table, write_json
from .tiny_rollout import BLOCK_FRAMES, Worlds, prepare, sample

COLUMNS = [
    "variant",
    "worlds",
    "revisit_psnr",
    "revisit_last",
    "reach_mib",
    "reach_growth",
    "bank_mib",
    "total_growth",
    "seconds",
]
GIVEN = 21
LAST = 60
# By which block the window, the recalled blocks and the bank of every variant are full.
SETTLED = 24


@dataclass(frozen=True)
class Variant:
    """A row: how the sampler forgets and remembers, and how the cache is stored."""

    name: str
    window: dict = field(default_factory=dict)
    memory: dict | None = None
    cache: dict = field(default_factory=dict)


# Everything in full precision, but in our cache, which knows its bytes block by block.
RAW = {"keep_first_blocks": 1 << 16}
WINDOW = {"window": 9, "sink": 3}
# A turn takes about seven blocks, and the model was trained on 36 frames: sink, window and bank hold 39.
BANK = {"blocks": 4, "bank_blocks": 9}
VARIANTS = (
    Variant("full, 16 bits", cache=RAW),
    Variant("window, 16 bits", WINDOW, cache=RAW),
    # As many frames to look back at as with retrieval: the sink, three blocks, and the four that come back.
    Variant("long window, 16 bits", {"window": 21, "sink": 3}, cache=RAW),
    Variant("retrieval, 16 bits", WINDOW, BANK, RAW),
    Variant("retrieval, 2 bits", WINDOW, BANK),
    Variant("retrieval by similarity, 2 bits", WINDOW, BANK | {"retrieval": "similarity"}),
    Variant("retrieval and compression, 2 bits", WINDOW, BANK | {"keep": 0.5}),
    Variant("long window, 2 bits", {"window": 21, "sink": 3}),
    Variant("retrieval, 2 bits, unbounded bank", WINDOW, {"blocks": 4}),
    Variant("full, 2 bits"),
)


def measure(variant: Variant, worlds: list[Worlds]) -> dict:
    """One row over all worlds."""
    pack = load_pack()
    core, sampling = pack.quantwm_core, pack.world_models.causal_wan.sampler
    rollout = core.window.RolloutSettings(frames_per_block=BLOCK_FRAMES, **variant.window)
    memory = None if variant.memory is None else core.memory.MemorySettings(**variant.memory)
    psnr, last, started = [], [], time.perf_counter()
    for world in worlds:
        patched, handle = pack.world_models.attach(world.model, core.CacheSettings(**variant.cache))
        sampler = sampling.WorldSampler(rollout, memory=memory)
        frames = world.decode(sample(world, patched, 0, sampler=sampler))
        truth = world.true_frames[:, world.seed_frames :]
        psnr += per_world_psnr(frames, truth)
        last += per_world_psnr(frames[:, -LAST:], truth[:, -LAST:])
    # The CPU keeps unpacked keys and values in float32.
    history = [_bf16_sizes(entry, packs=variant.cache != RAW) for entry in handle.history]
    settled = history[min(SETTLED, len(history) // 2)]
    return {
        "variant": variant.name,
        "worlds": len(worlds),
        "revisit_psnr": sum(psnr) / len(psnr),
        "revisit_last": sum(last) / len(last),
        "revisit_each": [round(value, 2) for value in psnr],
        "reach_mib": history[-1][0] / 2**20,
        "reach_growth": history[-1][0] / settled[0],
        "bank_mib": history[-1][1] / 2**20,
        "total_growth": sum(history[-1]) / sum(settled),
        "reach_bytes_by_block": [reach for reach, _ in history],
        "bank_bytes_by_block": [bank for _, bank in history],
        "seconds": (time.perf_counter() - started) / len(worlds),
    }


def _bf16_sizes(entry: dict, packs: bool) -> tuple[int, int]:
    """Bytes in reach and in the bank after a block."""
    share = 1 if packs else 2
    total, bank = entry["bytes_packed"] + entry["bytes_unpacked"], entry["bytes_bank"]
    return (total - bank) // share, bank // share


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--worlds", type=int, default=4)
    options.add_argument("--first-world", type=int, default=1000, help="seed of the first world")
    options.add_argument("--frames", type=int, default=200)
    options.add_argument("--variants", nargs="+", help="only these rows, by name")
    arguments = options.parse_args()
    count, frames = (1, 48) if arguments.quick else (arguments.worlds, arguments.frames)
    # One world at a time: blocks return to all worlds of a batch alike, and these turn at different rates.
    worlds = [prepare([arguments.first_world + index], GIVEN, frames) for index in range(count)]
    rows = []
    wanted = VARIANTS[:5] if arguments.quick else VARIANTS
    for variant in wanted:
        if arguments.variants and variant.name not in arguments.variants:
            continue
        rows.append(measure(variant, worlds))
        print_table(rows[-1:], COLUMNS)
        write_json(arguments.json, "benchmarks.retrieval", rows, worlds=count, frames=frames)
    print(f"\n{count} worlds, {frames} frames")
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()

"""Choosing settings for a budget: every method and bit width with its size, its peak and the longest video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .accounting import format_bytes
from .cache import CacheGeometry
from .planning import CacheBytes, CachePlan
from .settings import METHODS, CacheSettings
from .window import RolloutSettings

GB = 1 << 30
# Nobody waits for more; the search for the longest video ends here.
MOST_BLOCKS = 4096
# Wan's frames a second.
FRAME_RATE = 16

# Best picture first. Measured on the tiny world (README, quality): 54.8 dB in 4 bits, 40.4 in 2; keys carry the damage.
QUALITY_ORDER = (
    CacheSettings("off", 16, 16),
    CacheSettings("quantwm", 8, 8),
    CacheSettings("quantwm", 4, 4),
    CacheSettings("quantwm", 4, 2),
    CacheSettings("quantwm", 2, 2),
    CacheSettings("quantwm", 2, 2, cache_device="cpu"),
)
OTHERS = tuple(
    CacheSettings(method, bits, bits) for method in METHODS if method not in ("off", "quantwm") for bits in (4, 2)
)


@dataclass(frozen=True)
class World:
    """A model's cache at one picture size.

    frame_tokens: tokens of a latent frame; frames_per_latent: frames of the video that a latent frame stands for, the
    first one aside; element_bytes: size of the type in which keys and values are computed; conditionings: 2 where the
    guider's cfg is not 1, for the negative prompt has a cache of its own; prefilled: one forward fills the cache.
    """

    geometry: CacheGeometry
    frame_tokens: int
    frames_per_latent: int = 4
    element_bytes: int = 2
    conditionings: int = 1
    prefilled: bool = False

    def guided(self, guidance: bool) -> World:
        """The same with or without guidance. Given frames that fill the cache are remembered once for both prompts."""
        return replace(self, conditionings=2 if guidance and not self.prefilled else 1)

    def latents(self, frames: int) -> int:
        """Latent frames of a video of `frames` frames."""
        return (frames - 1) // self.frames_per_latent + 1

    def frames(self, latents: int) -> int:
        """Frames of a video of `latents` latent frames."""
        return self.frames_per_latent * (latents - 1) + 1 if latents else 0


@dataclass(frozen=True)
class PlanRow:
    """Settings, what they take for the whole video, and the longest video that fits, in frames (None: not asked)."""

    settings: CacheSettings
    cache: CacheBytes
    longest: int | None = None
    endless: bool = False

    @property
    def name(self) -> str:
        return self.settings.method + (" on the CPU" if self.settings.cache_device == "cpu" else "")


@dataclass(frozen=True)
class MemoryPlan:
    """The table for one video; `chosen` is the best picture that fits the budget (bytes), None where nothing does."""

    world: World
    frames: int
    frames_per_block: int
    budget: int | None
    rows: tuple[PlanRow, ...]
    chosen: PlanRow | None

    def fits(self, row: PlanRow) -> bool:
        return self.budget is None or row.cache.peak <= self.budget


def make_plan(
    world: World,
    frames: int,
    frames_per_block: int,
    budget: int | None = None,
    candidates: Sequence[CacheSettings] = QUALITY_ORDER,
    others: Sequence[CacheSettings] = OTHERS,
) -> MemoryPlan:
    """Plan a video of `frames` frames; the first of `candidates` that fits is chosen, `others` are listed only.

    Args:
        budget: bytes for cache, decoded layer and waiting blocks; None for no limit, and no choice.

    Raises:
        ValueError: for a length or block that no video has, naming rule, value and remedy.
    """
    if frames < 1:
        raise ValueError(f"length must be at least 1 frame; got {frames}. Raise length.")
    if budget is not None and budget <= 0:
        raise ValueError(f"budget must be more than 0 bytes; got {budget}. Give a larger budget.")
    rollout = RolloutSettings(frames_per_block)
    rows = tuple(_row(world, settings, frames, rollout, budget) for settings in (*candidates, *others))
    fitting = (row for row in rows[: len(candidates)] if budget is not None and row.cache.peak <= budget)
    return MemoryPlan(world, frames, frames_per_block, budget, rows, next(fitting, None))


def require_choice(plan: MemoryPlan) -> CacheSettings:
    """The chosen settings.

    Raises:
        ValueError: when nothing fits, with the smallest need and the longest video that would fit.
    """
    if plan.chosen is not None:
        return plan.chosen.settings
    if plan.budget is None:
        raise ValueError("settings are chosen for a budget; none was given. Give one.")
    smallest = min(plan.rows, key=lambda row: row.cache.peak)
    longest = max(plan.rows, key=lambda row: row.longest)
    shorter = f"lower length to {longest.longest}" if longest.longest else "lower width and height"
    raise ValueError(
        f"a cache must fit the budget of {format_bytes(plan.budget)}; {plan.frames} frames need at least "
        f"{format_bytes(smallest.cache.peak)} ({describe_row(smallest)}). Raise the budget, {shorter}, or let World "
        "Sampler forget with a window."
    )


def describe_row(row: PlanRow) -> str:
    """Method and bits in words."""
    if not row.settings.compresses:
        return "off, ComfyUI's own cache"
    return f"{row.name}, keys {row.settings.key_bits} bit, values {row.settings.value_bits} bit"


def longest_text(row: PlanRow) -> str:
    """The longest video of a row, in frames and seconds."""
    if row.longest is None:
        return "-"
    if not row.longest:
        return "nothing fits"
    seconds = row.longest / FRAME_RATE
    length = f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
    return f"{'over ' if row.endless else ''}{row.longest:,} frames ({length})"


def bits_text(row: PlanRow) -> str:
    return f"K{row.settings.key_bits} V{row.settings.value_bits}" if row.settings.compresses else "16 bit"


def format_plan(plan: MemoryPlan) -> str:
    """The plan as plain text: the video, the choice, the table."""
    geometry = plan.world.geometry
    budget = "no budget" if plan.budget is None else f"budget {format_bytes(plan.budget)}"
    latents = plan.world.latents(plan.frames)
    prompts = f" x {plan.world.conditionings} prompts (cfg)" if plan.world.conditionings > 1 else ""
    lines = [
        f"{plan.frames:,} frames = {latents:,} latent frames x {plan.world.frame_tokens:,} tokens, blocks of "
        f"{plan.frames_per_block}; {geometry.layers} layers x {geometry.heads} heads x {geometry.head_dim}{prompts}; "
        f"{budget}",
    ]
    if plan.chosen is not None:
        chosen = plan.chosen.cache
        lines.append(
            f"best picture that fits: {describe_row(plan.chosen)}: cache {format_bytes(chosen.resident)}, peak "
            f"{format_bytes(chosen.peak)}"
        )
    elif plan.budget is not None:
        lines.append("nothing fits the budget")
    header = ("", "method", "bits", "cache", "peak", "longest video that fits")
    table = [header]
    for row in plan.rows:
        mark = "*" if row is plan.chosen else "" if plan.fits(row) else "-"
        sizes = format_bytes(row.cache.resident), format_bytes(row.cache.peak)
        table.append((mark, row.name, bits_text(row), *sizes, longest_text(row)))
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table]
    if plan.budget is not None:
        lines.append("* chosen, - does not fit; peak is the cache, one decoded layer and blocks that wait, no weights")
    return "\n".join(lines)


def _row(world: World, settings: CacheSettings, frames: int, rollout: RolloutSettings, budget: int | None) -> PlanRow:
    latents = world.latents(frames)
    plan = _empty_plan(world, settings, min(latents, rollout.frames_per_block))
    for length in rollout.block_lengths(latents):
        plan.append(length * world.frame_tokens)
    cache = plan.bytes()
    if budget is None:
        return PlanRow(settings, cache)
    most, endless = _longest(world, settings, rollout.frames_per_block, budget)
    if cache.peak <= budget:
        most = max(most, latents)
    return PlanRow(settings, cache, world.frames(most), endless)


def _longest(world: World, settings: CacheSettings, block: int, budget: int) -> tuple[int, bool]:
    """Latent frames of the longest video in whole blocks within the budget, and whether the search was given up."""
    plan = _empty_plan(world, settings, block)
    for count in range(MOST_BLOCKS):
        plan.append(block * world.frame_tokens)
        if plan.bytes().peak > budget:
            return count * block, False
    return MOST_BLOCKS * block, True


def _empty_plan(world: World, settings: CacheSettings, block: int) -> CachePlan:
    """For blocks of so many latent frames."""
    rest = world.element_bytes, world.conditionings, block * world.frame_tokens, world.prefilled
    return CachePlan(settings, world.geometry, *rest)

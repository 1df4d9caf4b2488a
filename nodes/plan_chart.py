"""The chart of Memory Planner: a table of methods and bits, each with its peak to the scale of the budget."""

from __future__ import annotations

from PIL import Image

from ..quantwm_core.accounting import format_bytes
from ..quantwm_core.plan_table import MemoryPlan, PlanRow, bits_text, describe_row, longest_text
from .canvas import Canvas, with_alpha
from .charts import BACKGROUND, BF16, GRID, MUTED, PACKED, PANEL, TEXT

WIDTH, MARGIN = 1280, 24
HEADER, ROW, FOOTER = 176, 32, 52
TOO_LARGE = "#e8655a"
# Left edges; those of sizes are right edges, so that digits stand below each other.
METHOD, BITS, CACHE, PEAK, LONGEST, BARS = 56, 236, 420, 540, 570, 860


def plan_chart(plan: MemoryPlan) -> Image.Image:
    """Picture of a plan with a budget."""
    height = HEADER + ROW * len(plan.rows) + FOOTER + MARGIN
    canvas = Canvas(WIDTH, height, BACKGROUND)
    canvas.box((MARGIN, MARGIN, WIDTH - MARGIN, height - MARGIN), PANEL, radius=14)
    _draw_header(canvas, plan)
    right = WIDTH - MARGIN - 28
    # Rows that do not fit run to the edge, where the budget's line leaves room for them; a budget far above all rows
    # would make dots of them, and lies beyond the edge itself.
    largest = max(row.cache.peak for row in plan.rows)
    pixels = 0.8 * (right - BARS) / min(plan.budget, largest)
    for index, row in enumerate(plan.rows):
        _draw_row(canvas, plan, row, HEADER + ROW * index, pixels, right)
    bottom, limit = HEADER + ROW * len(plan.rows), BARS + plan.budget * pixels
    if limit < right:
        canvas.line([(limit, HEADER - 6), (limit, bottom + 2)], TEXT, width=1.5)
    canvas.text((right, bottom + 12), f"budget {format_bytes(plan.budget)}", MUTED, size=15, anchor="ra")
    note = "peak: the cache, one decoded layer and blocks that wait; no weights"
    canvas.text((METHOD, bottom + 12), note, MUTED, size=15)
    return canvas.finished()


def _draw_header(canvas: Canvas, plan: MemoryPlan) -> None:
    geometry, world = plan.world.geometry, plan.world
    canvas.text((METHOD, 44), "best picture that fits", MUTED, size=17)
    canvas.text((METHOD, 68), describe_row(plan.chosen) if plan.chosen else "nothing fits", TEXT, size=30, weight=0.4)
    latents = world.latents(plan.frames)
    canvas.text(
        (METHOD, 110),
        f"{plan.frames:,} frames = {latents:,} latent frames x {world.frame_tokens:,} tokens, blocks of "
        f"{plan.frames_per_block};  {geometry.layers} layers x {geometry.heads} heads x {geometry.head_dim}",
        MUTED,
        size=15,
    )
    titles = ((METHOD, "method", "la"), (BITS, "bits", "la"), (CACHE, "cache", "ra"), (PEAK, "peak", "ra"))
    for x, title, anchor in (*titles, (LONGEST, "longest video that fits", "la")):
        canvas.text((x, HEADER - 30), title, MUTED, size=15, anchor=anchor)
    canvas.line([(METHOD, HEADER - 7), (WIDTH - METHOD, HEADER - 7)], GRID)


def _draw_row(canvas: Canvas, plan: MemoryPlan, row: PlanRow, top: float, pixels: float, right: float) -> None:
    fits, chosen = plan.fits(row), row is plan.chosen
    if chosen:
        canvas.box((METHOD - 14, top, WIDTH - METHOD + 14, top + ROW), with_alpha(PACKED, 0.22), radius=6)
    middle, color = top + ROW / 2, TEXT if fits else MUTED
    cells = (
        (METHOD, row.name, "lm"),
        (BITS, bits_text(row), "lm"),
        (CACHE, format_bytes(row.cache.resident), "rm"),
        (PEAK, format_bytes(row.cache.peak), "rm"),
        (LONGEST, longest_text(row), "lm"),
    )
    for x, text, anchor in cells:
        canvas.text((x, middle), text, color, size=16, anchor=anchor, weight=0.3 if chosen else 0)
    fill = (PACKED if row.settings.compresses else BF16) if fits else TOO_LARGE
    end = min(BARS + row.cache.peak * pixels, right)
    canvas.box((BARS, top + 8, max(end, BARS + 2), top + ROW - 8), fill, radius=3)

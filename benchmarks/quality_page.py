"""Rows of benchmarks.quality as a page of tables, docs/quality.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Row = dict
# (heading, cell of a row); a row of an older run may lack a figure.
COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("run", lambda row: row["run"]),
    ("method", lambda row: _name(row)),
    ("K, V bits", lambda row: f"{row['key_bits']}, {row['value_bits']}"),
    ("bits a number", lambda row: _number(row, "bits_per_element", 2)),
    ("resident", lambda row: _number(row, "ratio_resident", 2, "x")),
    ("PSNR, dB", lambda row: "equal" if row["psnr_mean"] >= 100 else _interval(row, "psnr", 1)),
    ("worst", lambda row: "" if row["psnr_mean"] >= 100 else _number(row, "psnr_min", 1)),
    ("SSIM", lambda row: _interval(row, "ssim", 3)),
    ("flicker", lambda row: _number(row, "flicker", 2)),
    ("true view, dB", lambda row: _interval(row, "revisit_psnr", 1)),
    ("top-1 shift, %", lambda row: _shift(row)),
    ("logit MSE", lambda row: _number(row, "logit_mse", 4)),
    ("attention error", lambda row: _number(row, "attention_error", 2, " %", 100)),
    ("encode, s", lambda row: _number(row, "encode_seconds", 2)),
    ("decode, s", lambda row: _number(row, "decode_seconds", 2)),
    ("rollout, s", lambda row: _number(row, "seconds", 1)),
)
# Where heads are listed: rows of the comparison with both sides in two bits.
HEADS_BITS = (2, 2)

INTRODUCTION = """# Quality

The tiny world in the real ComfyUI: each world is given true frames, a whole turn of a room, and goes on from memory.
Every row is the mean over worlds and seeds, \u00b1 95 % of the mean where an interval is given.

- *bits a number*: everything stored at the end over all numbers of the cache; *resident*: BF16 over all that is alive.
- *PSNR*, *SSIM*, *flicker*: the frames against those of an uncompressed cache. Flicker is the mean of |d(t) - d(t-1)|,
  d being the difference of the two, in levels of 255. *Worst* is the lowest PSNR of any world and seed.
- *true view*: PSNR against what the camera would really see.
- *top-1 shift*, *logit MSE*, *attention error*: attention on the packed cache against attention on true keys and
  values, both asked by the queries of the full-precision rollout (teacher-forced), on the first seed: the share of
  queries whose strongest token changes, the mean squared error of logits of history tokens (each query's mean error
  removed), and the length of the error of the attention output over that of the output.
- *encode*, *decode*: seconds of one rollout of all worlds together; *rollout*: all of it, with the decoder.
"""


def write_page(path: Path, documents: list[dict]) -> None:
    """Write the rows of runs, as benchmarks.quality keeps them, as Markdown. A later run replaces earlier rows."""
    several = len(documents) > 1
    latest = {}
    for number, document in enumerate(documents, 1):
        for row in document["rows"]:
            kind = tuple(row.get(name, "") for name in ("method", "variant", "series", "key_bits", "value_bits"))
            latest[kind] = {**row, "run": str(number) if several else ""}
    rows = list(latest.values())
    series = list(dict.fromkeys(row.get("series", "") for row in rows))
    parts = [INTRODUCTION, _provenance(documents)]
    for name in sorted(series, key=lambda name: (name != "", series.index(name))):
        chosen = [row for row in rows if row.get("series", "") == name]
        parts.append(f"## {'Ablation: ' + name if name else 'Methods'}\n\n{_table(chosen)}")
    parts.append(_heads([row for row in rows if not row.get("series") and row.get("by_head")]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(part for part in parts if part), encoding="utf-8")


def _provenance(documents: list[dict]) -> str:
    """Which commands printed the figures, and where."""
    lines = ["Written by `python -m benchmarks.quality --docs`, not by hand, from:", ""]
    for number, document in enumerate(documents, 1):
        where = document["environment"]
        command, worlds, seeds = document["command"], document["worlds"], document["seeds"]
        arguments = document.get("arguments") or f"--worlds {worlds} --seeds {seeds}"
        machine = where["gpu"] or f"{where['cores']} {where['cpu']} cores, no GPU"
        lines.append(
            f"{number}. `python -m {command} {arguments}`: {worlds} worlds x {seeds} seeds; {machine}, "
            f"torch {where['torch']}, {where['date']}, commit {(where['commit'] or 'unknown')[:12]}"
        )
    return "\n".join(lines) + "\n"


def _table(rows: list[Row]) -> str:
    """All columns that any of the rows has something for."""
    cells = [[cell(row) for _, cell in COLUMNS] for row in rows]
    used = [i for i in range(len(COLUMNS)) if any(line[i] for line in cells)]
    head = [COLUMNS[i][0] for i in used]
    return _lines([head, ["---"] * len(used), *([line[i] for i in used] for line in cells)])


def _heads(rows: list[Row]) -> str:
    """Attention error of every head for the rows in two bits: which heads carry the damage."""
    rows = [row for row in rows if (row["key_bits"], row["value_bits"]) == HEADS_BITS]
    if not rows:
        return ""
    layers, heads = len(rows[0]["by_head"]["attention_error"]), len(rows[0]["by_head"]["attention_error"][0])
    names = [f"{layer}.{head}" for layer in range(layers) for head in range(heads)]
    lines = [["method", *names], ["---"] * (len(names) + 1)]
    for row in rows:
        errors = [error for layer in row["by_head"]["attention_error"] for error in layer]
        worst = max(errors)
        shown = [f"**{100 * error:.1f}**" if error == worst else f"{100 * error:.1f}" for error in errors]
        lines.append([_name(row), *shown])
    return (
        "## Where the damage sits\n\nAttention error in % of each head (layer.head), keys and values in 2 bits; "
        f"the worst in bold.\n\n{_lines(lines)}"
    )


def _lines(cells: list[list[str]]) -> str:
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)


def _name(row: Row) -> str:
    return f"`{row['method']}`" + ("" if row["variant"] == "default" else f" {row['variant']}")


def _number(row: Row, key: str, digits: int, unit: str = "", factor: float = 1) -> str:
    value = row.get(key)
    return "" if value is None else f"{factor * value:.{digits}f}{unit}"


def _shift(row: Row) -> str:
    """Percent, with its interval where a run has one."""
    half = row.get("top1_shift_ci95")
    shift = _number(row, "top1_shift", 1, factor=100)
    return shift if not shift or half is None or half != half else f"{shift} \u00b1 {100 * half:.1f}"


def _interval(row: Row, name: str, digits: int) -> str:
    """Mean and half width of its interval, which a single run has not."""
    mean, half = _number(row, f"{name}_mean", digits), row.get(f"{name}_ci95")
    # Not a number is unequal to itself.
    return mean if not mean or half is None or half != half else f"{mean} \u00b1 {half:.{digits}f}"

"""What a saved span holds, from the header of its safetensors file; its tensors are not read."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .accounting import against_bf16, format_bytes
from .span import PARTS, RAW, ROTATION, part_of

# What `PackedSpan.to_savable` writes beside the tensors.
SIZES = ("tokens", "heads", "head_dim")
NUMBERS = (*SIZES, "key_bits", "value_bits", "group_size", "rank", "phase")
FIELDS = ("method", *NUMBERS, "dtype")
HEADER_LENGTH_BYTES = 8
LARGEST_HEADER = 100 << 20  # the format's own limit
REMEDY = "Save a span so: tensors, metadata = span.to_savable(); safetensors.torch.save_file(tensors, FILE, metadata)."


@dataclass(frozen=True)
class SavedTensor:
    name: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class SavedSpan:
    """A span as its file describes it; `fields` are the strings of `FIELDS`."""

    fields: dict[str, str]
    tensors: tuple[SavedTensor, ...]

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of every part that is there, `raw` and the angles of RoPE last."""
        parts: Counter[str] = Counter()
        for tensor in self.tensors:
            parts[tensor.part] += tensor.nbytes
        return {part: parts[part] for part in (*PARTS, RAW, ROTATION) if parts[part]}

    @property
    def batch(self) -> int:
        return self.tensors[0].shape[0]

    @property
    def elements(self) -> int:
        """Scalars of keys and values."""
        return 2 * self.batch * math.prod(int(self.fields[name]) for name in SIZES)


def inspect_file(path: str | Path) -> SavedSpan:
    """The span saved in a file.

    Raises:
        ValueError: when the file is missing, cut off, or holds something else; says which, and what to give.
    """
    header = _read_header(Path(path))
    fields = header.pop("__metadata__", {})
    missing = [name for name in FIELDS if name not in fields]
    if missing or not header:
        lacking = f"metadata without {', '.join(missing)}" if missing else "no tensors"
        raise ValueError(f"a saved span has {', '.join(FIELDS)} in its metadata; {path} has {lacking}. {REMEDY}")
    wrong = [name for name in NUMBERS if not fields[name].isdecimal()]
    if wrong or not all(int(fields[name]) for name in SIZES):
        shown = ", ".join(f"{name} {fields[name]!r}" for name in wrong or SIZES)
        raise ValueError(f"numbers of a saved span are whole, and its sizes not 0; {path} has {shown}. {REMEDY}")
    try:
        tensors = [_tensor(name, entry) for name, entry in header.items()]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"tensors of a saved span belong to its parts; in {path}: {error}. {REMEDY}") from error
    return SavedSpan(fields, tuple(sorted(tensors, key=lambda tensor: tensor.name)))


def format_span(span: SavedSpan) -> str:
    """The span in words: method and bits, its size against BF16, parts, tensors."""
    fields, parts = span.fields, span.bytes_by_part
    total = sum(parts.values())
    lines = [
        f"method {fields['method']}, keys {fields['key_bits']} bit, values {fields['value_bits']} bit, groups of "
        f"{fields['group_size']}, rank {fields['rank']}, made from {fields['dtype']}",
        f"{int(fields['tokens']):,} tokens, {fields['heads']} heads x {fields['head_dim']}, batch {span.batch}, "
        f"phase {fields['phase']}",
        f"{format_bytes(total)} ({total:,} bytes), {8 * total / span.elements:.3f} bits a number, "
        f"{against_bf16(2 * span.elements / total)}",
        "parts:",
    ]
    lines += [f"  {part:<10} {count:>14,} bytes  {100 * count / total:5.1f} %" for part, count in parts.items()]
    lines.append("tensors:")
    lines += [f"  {t.name:<20} {t.dtype:<8} {list(t.shape)}  {t.nbytes:,} bytes" for t in span.tensors]
    return "\n".join(lines)


def _tensor(name: str, entry: dict) -> SavedTensor:
    start, end = entry["data_offsets"]
    if len(entry["shape"]) < 2:
        raise ValueError(f"{name} has shape {entry['shape']}, not [batch, heads, ...]")
    return SavedTensor(name, part_of(name), entry["dtype"], tuple(entry["shape"]), end - start)


def _read_header(path: Path) -> dict:
    """JSON header of a safetensors file: eight bytes of its length, little endian, then the text."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
            text = file.read(length) if 0 < length <= LARGEST_HEADER else b""
    except OSError as error:
        raise ValueError(f"the file must be readable; {path}: {error.strerror}. Check the path.") from error
    try:
        header = json.loads(text) if len(text) == length else None
    except ValueError:  # neither JSON nor text
        header = None
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise ValueError(f"the file must be in safetensors format; {path} is not, or was cut off. {REMEDY}")
    return header

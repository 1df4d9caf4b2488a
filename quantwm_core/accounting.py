"""What a run's cache really took, in bytes, from the storages that exist."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .jensen import layers_read
from .overrides import head_groups
from .packing import TYPICAL_BLOCK, waiting_bytes
from .record import CacheHandle
from .span import PARTS, PackedSpan

if TYPE_CHECKING:
    from .cache import CacheGeometry, WorldCache
    from .layer_cache import LayerCache
    from .settings import CacheSettings


def build_record(caches: Sequence[WorldCache]) -> dict:
    """The record of a run, JSON-ready; with guidance a run has a cache for each conditioning, all of one shape.

    tokens, blocks: of one of them; conditionings: how many there are. Everything in bytes and seconds is for all.
    bytes_unpacked: keys and values held in full precision; bytes_state: what the method keeps between spans;
    bytes_bank: the part of all this that only the bank holds, out of reach of the block being made;
    bytes_workspace_peak: the largest decoded layer, alive only while that layer attends.
    ratio_packed: BF16 size of the packed scalars over their packed bytes; ratio_resident: BF16 size of everything
    over all that is resident when the run ends (packed, unpacked and state).
    blocks_by_bits: with a budget, how many blocks ended in which bits of keys/values.
    """
    usage = sum((cache.usage() for cache in caches), Counter())
    first = caches[0]
    geometry, settings, layers = first.geometry, first.settings, [layer for cache in caches for layer in cache.layers]
    # An interrupt can leave the first layers a block ahead: a block counts once all layers have it.
    last = first.layers[-1]
    packed = sum(usage[part] for part in PARTS)
    unpacked = usage["raw"] + usage["blocks"]
    resident = packed + unpacked + usage["state"]
    bf16 = sum(geometry.bytes_bf16(layer.tokens) for layer in layers) // geometry.layers
    elements = sum(layer.packed_elements() for layer in layers)
    backend, backend_reason = first.backend.summary()
    return {
        "method": settings.method,
        "key_bits": settings.key_bits,
        "value_bits": settings.value_bits,
        "bit_overrides": settings.bit_overrides.strip(),
        "budget_bytes": sum(cache.settings.budget_bytes for cache in caches),
        "blocks_by_bits": _blocks_by_bits(last) if settings.budget_gb else {},
        "backend": backend,
        "backend_reason": backend_reason,
        "layers": geometry.layers,
        "heads": geometry.heads,
        "head_dim": geometry.head_dim,
        "conditionings": len(caches),
        "tokens": last.tokens,
        "blocks": last.blocks,
        "bytes_bf16": bf16,
        "bytes_packed": packed,
        "bytes_unpacked": unpacked,
        "bytes_state": usage["state"],
        "bytes_bank": sum(layer.bank_bytes() for layer in layers),
        "blocks_in_bank": sum(entry.blocks for entry in last.bank),
        "bytes_workspace_peak": max(layer.workspace_bytes for layer in layers),
        "bytes_by_part": {part: usage[part] for part in PARTS},
        "ratio_packed": _ratio(2 * elements, packed),
        "ratio_resident": _ratio(bf16, resident),
        "encode_seconds": round(sum(cache.encode_watch.seconds() for cache in caches), 4),
        "decode_seconds": round(sum(cache.decode_watch.seconds() for cache in caches), 4),
        "pack_events": sum(layer.pack_events for layer in layers),
    }


def native_record(
    settings: CacheSettings, geometry: CacheGeometry, tokens: int, resident: int, conditionings: int = 1
) -> dict:
    """Record of a run on the host's own cache, which knows no blocks; `resident` bytes for all conditionings."""
    bf16 = conditionings * geometry.bytes_bf16(tokens)
    return {
        "method": settings.method,
        "key_bits": settings.key_bits,
        "value_bits": settings.value_bits,
        "backend": "host",
        "backend_reason": "the host's own cache is used",
        "layers": geometry.layers,
        "heads": geometry.heads,
        "head_dim": geometry.head_dim,
        "conditionings": conditionings,
        "tokens": tokens,
        "blocks": 0,
        "bytes_bf16": bf16,
        "bytes_packed": 0,
        "bytes_unpacked": resident,
        "bytes_state": 0,
        "bytes_bank": 0,
        "blocks_in_bank": 0,
        "bytes_workspace_peak": 0,
        "bytes_by_part": dict.fromkeys(PARTS, 0),
        "ratio_packed": 1.0,
        "ratio_resident": _ratio(bf16, resident),
        "encode_seconds": 0.0,
        "decode_seconds": 0.0,
        "pack_events": 0,
    }


def joined_entries(entries: Sequence[dict]) -> dict:
    """One history entry for a block, from those of all conditionings' caches: bytes and times together."""
    if len(entries) == 1:
        return entries[0]
    joined = dict(entries[-1])
    for name, value in joined.items():
        if isinstance(value, dict):
            joined[name] = {part: sum(entry[name][part] for entry in entries) for part in value}
        elif name.startswith("bytes_"):
            joined[name] = sum(entry[name] for entry in entries)
        elif name in ("encode_seconds", "decode_seconds"):
            joined[name] = round(sum(entry[name] for entry in entries), 4)
    return joined


# Scales, ids, codebooks and corrections beside the codes; generous, for planning memory before a run.
OVERHEAD_BITS = 1.25


def estimate_bytes(
    settings: CacheSettings, geometry: CacheGeometry, tokens: int, conditionings: int = 1, block: int = TYPICAL_BLOCK
) -> int:
    """Memory to plan for a run of `tokens` tokens in blocks of `block` at the most: packed cache, one decoded layer
    (more where attention is corrected), and blocks that wait to be packed.

    Conditionings are asked one after the other: each adds what it stores. How many blocks a setting keeps in full
    precision depends on the sampler, so then all of them are assumed.
    """
    bf16 = geometry.bytes_bf16(tokens)
    stored = bf16 * _planned_bits(settings, geometry) / 16
    if settings.budget_gb:
        most = bf16 * _planned_bits(settings.in_width(settings.widths[-1]), geometry) / 16
        # The budget is for all conditionings.
        stored = min(most, max(stored, settings.budget_bytes / conditionings))
    if settings.cache_device == "cpu":
        stored *= min(1, 2 / geometry.layers)  # the layer that attends, and the next one on its way
    if settings.keep_first_blocks or settings.keep_recent_blocks or settings.span_blocks > 1:
        stored = bf16
    decoded = bf16 / geometry.layers * layers_read(settings.method, settings.jensen, geometry.head_dim)
    waiting = min(waiting_bytes(geometry.layers, geometry.bytes_bf16(1) // geometry.layers, block), 2 * bf16)
    return round(conditionings * stored + decoded + waiting)


def _blocks_by_bits(layer: LayerCache) -> dict[str, int]:
    """Blocks of a layer, by the bits of keys/values, the fewest first; full precision is 16/16."""
    count: Counter[tuple[int, int]] = Counter()
    for entry in layer.entries + layer.bank:
        stored = entry.stored
        count[(stored.key_bits, stored.value_bits) if isinstance(stored, PackedSpan) else (16, 16)] += entry.blocks
    return {f"{keys}/{values}": count[keys, values] for keys, values in sorted(+count)}


def _planned_bits(settings: CacheSettings, geometry: CacheGeometry) -> float:
    """Bits a scalar to plan for, overrides included."""
    total = 0.0
    for layer in range(geometry.layers):
        groups = head_groups(settings.overrides, (settings.key_bits, settings.value_bits), layer, geometry.heads)
        for bits, heads in groups.items():
            total += len(heads) * sum(b if b == 16 else b + OVERHEAD_BITS for b in bits)
    return total / (2 * geometry.layers * geometry.heads)


def _ratio(numerator: int, denominator: int) -> float:
    return round(numerator / denominator, 4) if denominator else 1.0


def format_bytes(count: int) -> str:
    """Human size with three significant digits, binary units."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 999.5 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.3g} {unit}"


def against_bf16(ratio: float) -> str:
    """In words, how large a cache is that BF16 would make `ratio` times as large."""
    if ratio >= 1.05:
        return f"{ratio:.1f}x smaller than BF16"
    return "as large as BF16" if ratio > 0.95 else f"{1 / ratio:.1f}x larger than BF16"


def describe(record: dict) -> str:
    """Method and bits of a record in words."""
    if not record["bytes_packed"]:
        return f"{record['method']} (the host's own cache)"
    if record.get("budget_bytes"):
        blocks = ", ".join(f"{count} in {bits}" for bits, count in record["blocks_by_bits"].items())
        return f"{record['method']} in a budget of {format_bytes(record['budget_bytes'])}, blocks by bits: {blocks}"
    others = f", except {record['bit_overrides']}" if record.get("bit_overrides") else ""
    return f"{record['method']}, keys {record['key_bits']} bit, values {record['value_bits']} bit{others}"


def _per_conditioning(record: dict) -> str:
    count = record.get("conditionings", 1)
    return f", for each of {count} conditionings (cfg)" if count > 1 else ""


def format_report(handle: CacheHandle) -> str:
    """A few lines for people, then the record as one line of JSON; says so when nothing was sampled yet."""
    record = handle.record
    if record is None:
        return "Nothing sampled yet. Connect `after` to the sampler's output so that this node runs after it."
    resident = record["bytes_packed"] + record["bytes_unpacked"] + record["bytes_state"]
    parts = {n: b for n, b in record["bytes_by_part"].items() if b}
    # The host's own cache knows no blocks.
    blocks = f" in {record['blocks']} blocks" if record["blocks"] else ""
    lines = [
        f"{against_bf16(record['ratio_resident'])}: {format_bytes(resident)} instead of "
        f"{format_bytes(record['bytes_bf16'])}",
        f"{describe(record)}, backend {record['backend']}",
        f"{record['tokens']:,} tokens{blocks}, {record['layers']} layers x {record['heads']} heads x "
        f"{record['head_dim']}{_per_conditioning(record)}",
    ]
    if parts:
        lines.append("parts: " + ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items()))
    lines.append(
        f"kept in full precision {format_bytes(record['bytes_unpacked'])}, method state "
        f"{format_bytes(record['bytes_state'])}, workspace {format_bytes(record['bytes_workspace_peak'])}"
    )
    if 0 < record.get("budget_bytes", 0) < resident - record["bytes_bank"]:
        over = format_bytes(resident - record["bytes_bank"] - record["budget_bytes"])
        lines.append(f"the budget is exceeded by {over}: even the fewest bits do not fit into it")
    if record["blocks_in_bank"]:
        lines.append(f"of this, {record['blocks_in_bank']} blocks in the bank: {format_bytes(record['bytes_bank'])}")
    lines.append(f"encode {record['encode_seconds']:.2f} s, decode {record['decode_seconds']:.2f} s")
    lines.append(json.dumps(record))
    return "\n".join(lines)

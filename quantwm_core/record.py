"""The small, JSON-ready trace of a run that nodes hand around instead of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from .settings import CacheSettings


@dataclass
class CacheHandle:
    """Settings of a patched model and what its last run measured.

    record: None before the first run; see `accounting.build_record` for the keys.
    history: one entry per committed block: block, tokens, bytes_bf16, bytes_packed, bytes_unpacked (with the method's
        state), bytes_bank, bytes_by_part, and so far in the run: encode_seconds, decode_seconds (of what the device has
        finished), seconds, backend and backend_reason.
    """

    settings: CacheSettings
    record: dict | None = None
    history: list[dict] = field(default_factory=list)

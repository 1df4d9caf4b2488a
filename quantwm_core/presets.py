"""Named choices of settings. The values are data, in presets.json, so that a page can show them too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Saved workflows store these names: only ever append.
PRESETS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
# The preset that decides nothing.
CUSTOM = "custom"
PRESET_NAMES = (*PRESETS, CUSTOM)


def with_preset(name: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `CacheSettings`: what the preset says, and of `chosen` what it leaves open: where the cache lives,
    and the backend. `custom` leaves everything open.

    Raises:
        ValueError: for a name that there is not.
    """
    if name not in PRESET_NAMES:
        raise ValueError(f"preset must be one of {', '.join(PRESET_NAMES)}; got {name!r}. Pick a listed value.")
    return chosen | PRESETS.get(name, {})

"""What a user can choose about the cache, validated once, before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .overrides import BitOverride, parse_overrides

# Saved workflows store these names: only ever append.
METHODS = ("quantwm", "off", "quantwm-paper", "rtn", "kivi", "qvg", "qvg-pro", "quarot")
BITS = (2, 4, 8, 16)
GROUP_SIZES = (16, 32, 64, 128)
CACHE_DEVICES = ("gpu", "cpu")
BACKENDS = ("auto", "triton", "torch")
JENSEN = ("off", "exact", "second-order")
MAX_CENTROIDS = 256
MAX_RANK = 64
# Widths that a budget chooses between.
BUDGET_BITS = (2, 4, 8)
GIB = 1 << 30


@dataclass(frozen=True)
class CacheSettings:
    """Settings of one cached run. Zero means "automatic" for `centroids`, `candidates`, `rank` and
    `span_blocks`.

    budget_gb: GiB that the cache may take, 0 for no limit. With one, blocks are stored in any of `widths`.

    Raises:
        ValueError: for a value out of its domain; the message names the rule, the value and the remedy.
    """

    method: str = "quantwm"
    key_bits: int = 2
    value_bits: int = 2
    group_size: int = 64
    centroids: int = 0
    candidates: int = 0
    rank: int = 0
    span_blocks: int = 0
    keep_first_blocks: int = 0
    keep_recent_blocks: int = 0
    cache_device: str = "gpu"
    backend: str = "auto"
    jensen: str = "off"
    bit_overrides: str = ""
    budget_gb: float = 0.0

    def __post_init__(self) -> None:
        _require_choice("method", self.method, METHODS)
        _require_choice("key_bits", self.key_bits, BITS)
        _require_choice("value_bits", self.value_bits, BITS)
        _require_choice("group_size", self.group_size, GROUP_SIZES)
        _require_choice("cache_device", self.cache_device, CACHE_DEVICES)
        _require_choice("backend", self.backend, BACKENDS)
        _require_choice("jensen", self.jensen, JENSEN)
        _require_range("centroids", self.centroids, 0, MAX_CENTROIDS, "ids are stored in one byte")
        _require_range("candidates", self.candidates, 0, MAX_CENTROIDS, "it counts centroids compared per key")
        _require_range("rank", self.rank, 0, MAX_RANK, "each step of rank adds a stored coefficient per key")
        parse_overrides(self.bit_overrides, BITS)
        for name in ("span_blocks", "keep_first_blocks", "keep_recent_blocks"):
            _require_range(name, getattr(self, name), 0, 1 << 20, "it counts blocks")
        self._check_budget()

    @property
    def compresses(self) -> bool:
        """False when the host's own cache is used untouched: method `off`, or 16 bits for keys and values."""
        used = {(self.key_bits, self.value_bits), *(override.bits for override in self.overrides)}
        return self.method != "off" and used != {(16, 16)}

    @property
    def budget_bytes(self) -> int:
        """Bytes that the cache may take; 0 for no limit."""
        return round(self.budget_gb * GIB)

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """Bits (keys, values) that a block may be stored in, fewest first: from the chosen ones up to 8 each."""
        least = self.key_bits, self.value_bits
        if not self.budget_gb:
            return (least,)
        return tuple(dict.fromkeys((max(least[0], bits), max(least[1], bits)) for bits in BUDGET_BITS))

    def in_width(self, width: tuple[int, int]) -> CacheSettings:
        """The same in other bits (keys, values)."""
        if width == (self.key_bits, self.value_bits):
            return self
        return replace(self, key_bits=width[0], value_bits=width[1])

    @property
    def overrides(self) -> tuple[BitOverride, ...]:
        """Layers and heads with other bits than `key_bits` and `value_bits`."""
        return parse_overrides(self.bit_overrides, BITS)

    def _check_budget(self) -> None:
        if not 0 <= self.budget_gb < math.inf:
            raise ValueError(
                f"budget_gb must be 0 (no limit) or a size in GB; got {self.budget_gb!r}. Change budget_gb."
            )
        if self.budget_gb and not self.compresses:
            raise ValueError(
                f"a budget needs bits to choose between; got method {self.method!r} with {self.key_bits}-bit keys and "
                f"{self.value_bits}-bit values, which packs nothing. Choose another method or fewer bits in QuantWM KV "
                "Cache."
            )
        if self.budget_gb and self.overrides:
            raise ValueError(
                f"a budget decides the bits of whole blocks; got bit_overrides {self.bit_overrides!r} as well. Empty "
                "bit_overrides in QuantWM KV Cache, or take out Cache Budget."
            )


def _require_choice(name: str, value, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}. Pick a listed value.")


def _require_range(name: str, value: int, low: int, high: int, why: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high} ({why}); got {value!r}. Change {name}.")

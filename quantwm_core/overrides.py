"""Other bit widths for some layers or heads, from a short text such as `2.0=16, 5-7=4, 9=4/2`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

FORM = "LAYER=BITS, LAYER.HEAD=BITS or LAYER=KEY_BITS/VALUE_BITS, layers and heads counted from 0, FIRST-LAST for many"
_ENTRY = re.compile(r"(\d+)(?:-(\d+))?(?:\.(\d+)(?:-(\d+))?)?=(\d+)(?:/(\d+))?")


@dataclass(frozen=True)
class BitOverride:
    """Bits of keys and values in the heads `heads` (None: all) of the layers `layers`."""

    layers: range
    heads: range | None
    key_bits: int
    value_bits: int

    @property
    def bits(self) -> tuple[int, int]:
        return self.key_bits, self.value_bits


@lru_cache(maxsize=64)
def parse_overrides(text: str, allowed: tuple[int, ...]) -> tuple[BitOverride, ...]:
    """The overrides in a text; entries are set apart by commas or line breaks.

    Raises:
        ValueError: for an entry of another form or with other bits than `allowed`; the message names it.
    """
    return tuple(_parse(entry.replace(" ", ""), allowed) for entry in re.split(r"[,;\n]", text) if entry.strip())


def _parse(entry: str, allowed: tuple[int, ...]) -> BitOverride:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(f"bit_overrides must look like {FORM}; got {entry!r}. Write for example 2.0=16, 5=4.")
    first, last, head, last_head, key_bits, value_bits = (None if n is None else int(n) for n in match.groups())
    value_bits = key_bits if value_bits is None else value_bits
    for bits in (key_bits, value_bits):
        if bits not in allowed:
            raise ValueError(
                f"bits in bit_overrides must be one of {', '.join(map(str, allowed))}; got {bits} in {entry!r}. "
                "Pick a listed value."
            )
    layers, heads = _range(entry, first, last), None if head is None else _range(entry, head, last_head)
    return BitOverride(layers, heads, key_bits, value_bits)


def _range(entry: str, first: int, last: int | None) -> range:
    last = first if last is None else last
    if last < first:
        raise ValueError(
            f"a range in bit_overrides must run upwards; got {entry!r}. Write {last}-{first}, not {first}-{last}."
        )
    return range(first, last + 1)


def head_groups(
    overrides: tuple[BitOverride, ...], bits: tuple[int, int], layer: int, heads: int
) -> dict[tuple[int, int], list[int]]:
    """The heads of one layer by their bits (keys, values); `bits` where nothing else is said. Later entries win."""
    chosen = [bits] * heads
    for override in overrides:
        if layer in override.layers:
            for head in range(heads) if override.heads is None else override.heads:
                chosen[head] = override.bits
    return {each: [head for head in range(heads) if chosen[head] == each] for each in dict.fromkeys(chosen)}


def check_overrides(overrides: tuple[BitOverride, ...], layers: int, heads: int) -> None:
    """Refuse layers and heads that a model does not have.

    Raises:
        ValueError: naming the largest number allowed.
    """
    for override in overrides:
        last_head = override.heads[-1] if override.heads else 0
        for kind, last, count in (("layer", override.layers[-1], layers), ("head", last_head, heads)):
            if last >= count:
                raise ValueError(
                    f"bit_overrides name {kind} {last}, but this model's {kind}s go from 0 to {count - 1}. "
                    "Change bit_overrides in QuantWM KV Cache."
                )

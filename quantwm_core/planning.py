"""What a run's cache will take before it runs: the rules of `LayerCache` in numbers, and the bytes of `layouts`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .cache import CacheGeometry
from .jensen import layers_read
from .layouts import span_bytes, state_bytes
from .methods import Method, build_method
from .methods.base import LayerState
from .overrides import check_overrides, head_groups
from .packing import TYPICAL_BLOCK, layers_together
from .settings import CacheSettings
from .span import PARTS, RAW

# Parts that spans share with the method's state: they stay on the GPU where packed blocks live on the CPU.
STAYING = {"quantwm": ("centroids", "psac_u")}


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a planned cache, of all conditionings, named as in a run's record (`accounting.build_record`).

    workspace: the largest decoded layer; waiting: blocks in full precision of the layers that pack together, and the
    copy in which they are joined; on_device: what of the resident bytes the GPU holds.
    """

    tokens: int
    bf16: int
    parts: dict[str, int]
    unpacked: int
    state: int
    workspace: int
    waiting: int
    on_device: int

    @property
    def packed(self) -> int:
        return sum(self.parts.values())

    @property
    def resident(self) -> int:
        return self.packed + self.unpacked + self.state

    @property
    def peak(self) -> int:
        """Most memory of the device that the cache needs at once, beside weights and activations."""
        return self.on_device + self.workspace + self.waiting


class CachePlan:
    """A cache that only counts. `append` blocks in their order; `bytes` says what all of them take.

    Args:
        element_bytes: size of the type in which the model computes keys and values.
        block: tokens of the largest block, as `WorldCache` is told.
        conditionings: how many prompts remember on their own: 2 with guidance. They are asked one after the other.
        prefilled: one forward fills the cache, as `WorldCache` is told.

    Raises:
        ValueError: when the settings' overrides name layers or heads that there are not.
    """

    def __init__(
        self,
        settings: CacheSettings,
        geometry: CacheGeometry,
        element_bytes: int = 2,
        conditionings: int = 1,
        block: int = TYPICAL_BLOCK,
        prefilled: bool = False,
    ) -> None:
        check_overrides(settings.overrides, geometry.layers, geometry.heads)
        self.settings = settings
        self.geometry = geometry
        self.element_bytes = element_bytes
        self.conditionings = conditionings
        self._largest = self._last = 0
        self._together = 1
        # Layers, or heads of layers, with the same bits are alike: each kind is counted once, for so many layers.
        kinds: Counter[tuple[CacheSettings, int]] = Counter()
        if settings.overrides:
            bits = settings.key_bits, settings.value_bits
            for layer in range(geometry.layers):
                for (key, value), heads in head_groups(settings.overrides, bits, layer, geometry.heads).items():
                    own = replace(settings, key_bits=key, value_bits=value, bit_overrides="")
                    kinds[own, len(heads)] += 1
        else:
            kinds[settings, geometry.heads] = geometry.layers
            if settings.compresses:
                self._together = layers_together(geometry.layers, geometry.bytes_bf16(1) // geometry.layers, block)
        self._layers = [
            (_LayerPlan(own, heads, geometry, element_bytes, self._together > 1, prefilled), count)
            for (own, heads), count in kinds.items()
        ]

    @property
    def tokens(self) -> int:
        return self._layers[0][0].tokens

    def append(self, tokens: int) -> None:
        """A finished block of `tokens` tokens."""
        self._last = tokens
        self._largest = max(self._largest, tokens)
        for layer, _ in self._layers:
            layer.append(tokens)

    def bytes(self) -> CacheBytes:
        """What the cache takes now."""
        parts, unpacked, state = Counter(dict.fromkeys(PARTS, 0)), 0, 0
        for layer, layers in self._layers:
            count = layers * self.conditionings
            for name, each in layer.parts.items():
                parts[name] += each * count
            unpacked += layer.unpacked * count
            state += layer.state * count
        unpacked += parts.pop(RAW, 0)
        whole = {"tokens": self.tokens, "bf16": self.conditionings * self.geometry.bytes_bf16(self.tokens)}
        whole |= {"parts": dict(parts), "unpacked": unpacked, "state": state}
        if not self.settings.compresses:
            return CacheBytes(**whole, workspace=0, waiting=0, on_device=unpacked)
        # The first block has nothing to look back at, and is not decoded.
        workspace = max(layer.decoded for layer, _ in self._layers) if self.tokens > self._last else 0
        workspace *= layers_read(self.settings.method, self.settings.jensen, self.geometry.head_dim)
        copies = 2 if self._together > 1 else 1
        waiting = copies * self._together * self._full(self._largest) // self.geometry.layers
        on_device = sum(parts.values()) + unpacked + state
        if self.settings.cache_device == "cpu":
            on_device = self._left_on_device(parts) + unpacked + state
        return CacheBytes(**whole, workspace=workspace, waiting=waiting, on_device=on_device)

    def _full(self, tokens: int) -> int:
        return self.geometry.bytes_bf16(tokens) // 2 * self.element_bytes

    def _left_on_device(self, parts: Counter[str]) -> int:
        """Of packed blocks on the CPU: what is shared, the layer that attends, and the next one on its way."""
        shared = sum(parts[name] for name in STAYING.get(self.settings.method, ()))
        own = sum(parts.values()) - shared
        return shared + round(own * min(1, 2 / self.geometry.layers))


class _LayerPlan:
    """One layer, or the heads of one layer that have the same bits."""

    def __init__(
        self,
        settings: CacheSettings,
        heads: int,
        geometry: CacheGeometry,
        element_bytes: int,
        grouped: bool,
        prefilled: bool,
    ) -> None:
        self.settings = settings
        self.parts: Counter[str] = Counter()
        self.tokens = self.blocks = 0
        self._rows = heads * geometry.batch
        # Weights know no batch; layers that pack together repeat what is made of them for each world.
        self._state_rows = self._rows if grouped or settings.method != "quantwm" else heads
        self._head_dim = geometry.head_dim
        self._element_bytes = element_bytes
        self._method: Method | None = build_method(settings) if settings.compresses else None
        self._learned = LayerState()
        # Its queries count as asked before, and are not kept.
        self._prefilled = prefilled
        self._learned.earlier.weight = float(prefilled)
        self._never_packed = 0
        # Number and tokens of blocks in full precision that are to be packed.
        self._waiting: list[tuple[int, int]] = []

    @property
    def decoded(self) -> int:
        """All keys and values in full precision."""
        return self._full(self.tokens)

    @property
    def unpacked(self) -> int:
        """Blocks in full precision, and their queries' moments where the method asks for them."""
        waiting = self._full(self._never_packed + sum(tokens for _, tokens in self._waiting))
        if self._method is not None and self._method.uses_queries:
            waiting += len(self._waiting) * self._rows * 4 * self._head_dim**2
        return waiting

    @property
    def state(self) -> int:
        if not self._learned.tokens or (self._prefilled and self.settings.method == "quantwm-paper"):
            return 0
        return state_bytes(self.settings, self._head_dim) * self._state_rows

    def append(self, tokens: int) -> None:
        number, self.blocks = self.blocks, self.blocks + 1
        self.tokens += tokens
        if self._method is None or number < self.settings.keep_first_blocks:
            self._never_packed += tokens
            return
        self._waiting.append((number, tokens))
        for span in self._take_ready():
            added = span_bytes(self.settings, span, self._head_dim, self._learned, self._element_bytes)
            for name, count in added.items():
                self.parts[name] += count * self._rows

    def _take_ready(self) -> list[int]:
        """Tokens of the spans to pack now; see `packing.ready_groups`."""
        last = self.blocks - self.settings.keep_recent_blocks
        ready = sum(number < last for number, _ in self._waiting)
        if not ready:
            return []
        if self._method.recent_tokens:
            return self._take_older_than_recent(ready)
        per_span, spans = max(1, self.settings.span_blocks), []
        while ready >= per_span:
            spans.append(sum(tokens for _, tokens in self._waiting[:per_span]))
            del self._waiting[:per_span]
            ready -= per_span
        return spans

    def _take_older_than_recent(self, ready: int) -> list[int]:
        held = sum(tokens for _, tokens in self._waiting[:ready])
        after = sum(tokens for _, tokens in self._waiting[ready:])
        take = held - max(0, self._method.recent_tokens - after)
        take -= take % self._method.token_group
        if take <= 0:
            return []
        left = take
        while left:
            number, tokens = self._waiting.pop(0)
            if tokens > left:
                self._waiting.insert(0, (number, tokens - left))
            left -= min(tokens, left)
        return [take]

    def _full(self, tokens: int) -> int:
        return 2 * self._rows * self._head_dim * tokens * self._element_bytes


def plan_bytes(
    settings: CacheSettings,
    geometry: CacheGeometry,
    blocks: Iterable[int],
    element_bytes: int = 2,
    prefilled: bool = False,
) -> CacheBytes:
    """What a run that commits `blocks` (tokens of each) holds in the end."""
    blocks = list(blocks)
    largest = max(blocks, default=TYPICAL_BLOCK)
    plan = CachePlan(settings, geometry, element_bytes, block=largest, prefilled=prefilled)
    for tokens in blocks:
        plan.append(tokens)
    return plan.bytes()

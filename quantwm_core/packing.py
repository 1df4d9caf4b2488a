"""Packing the same blocks of several layers together, because a layer alone is too little work for a GPU.

Layers become entries of the batch: a method packs them as it packs a batch, and each layer keeps its slice. What the
method remembers between spans is one state for all of them. They must therefore pack in step, which they do: a block
becomes history in every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from . import operations  # noqa: F401  (registers the eager twins)
from .backends import Dispatcher, call_facts
from .methods import LayerState, Method
from .prefetch import moved
from .query_stats import QueryStats
from .rotation import joined_rotation
from .settings import CacheSettings
from .side_stream import SideStream
from .span import PackedSpan, RawBlock
from .stopwatch import Stopwatch

if TYPE_CHECKING:
    from .layer_cache import LayerCache

# Keys and values in full precision that may wait for the other layers of their group, and again while they are joined.
GROUP_BYTES = 192 << 20
# Tokens of a block, for planning: three latent frames at 480p.
TYPICAL_BLOCK = 4680


@dataclass(frozen=True)
class Reach:
    """How a window divides the history: the first `sink` blocks stay for ever, of the others `blocks` at most (0: all).

    Blocks that are packed together leave together, so they must not wait for more than a window holds, nor for those
    that stay.
    """

    sink: int = 0
    blocks: int = 0

    def divided(self, ready: Sequence[int], firsts: Sequence[int], per_span: int) -> list[list[int]]:
        """Entries `ready`, of blocks `firsts`, as spans of `per_span` blocks, or as many as may be together."""
        per_span = min(per_span, self.blocks or per_span)
        stay = [index for index, first in zip(ready, firsts) if first < self.sink]
        others = ready[len(stay) :]
        # What is left of those that stay when the last of them comes is a span as well.
        last = min(per_span, self.sink - firsts[0]) if stay else per_span
        return _in_spans(stay, last) + _in_spans(others, per_span)


def layers_together(layers: int, bytes_per_token: int, block: int = TYPICAL_BLOCK) -> int:
    """How many of `layers` to pack at once, for keys and values of `bytes_per_token` in each: groups of like size.

    block: tokens of the largest block, or of first frames that are given.
    """
    most = max(1, GROUP_BYTES // (block * bytes_per_token))
    groups = -(-layers // most)
    return -(-layers // groups)


def waiting_bytes(layers: int, bytes_per_token: int, block: int = TYPICAL_BLOCK) -> int:
    """Most that a group holds in full precision while it packs: a block of each layer, and again as one batch."""
    together = layers_together(layers, bytes_per_token, block)
    return (2 if together > 1 else 1) * together * block * bytes_per_token


class Packer:
    """Turns blocks of a group of layers into spans.

    Args:
        metrics: for each layer, a function giving the Gram matrix `[H, D, D]` of the output projection, or None.
        beside: packs on a stream of its own; whoever reads spans then calls `join` first.
        prefilled: blocks come with queries that were asked before them, and so are earlier ones already.
    """

    def __init__(
        self,
        settings: CacheSettings,
        method: Method,
        metrics: Sequence[Callable[[], torch.Tensor] | None],
        backend: Dispatcher,
        watch: Stopwatch,
        beside: torch.device | None = None,
        prefilled: bool = False,
    ) -> None:
        self.settings = settings
        self.method = method
        self.layers = len(metrics)
        self._metrics = metrics
        self._backend = backend
        self._watch = watch
        self._side = SideStream(beside)
        self._prefilled = prefilled
        self.state = LayerState()

    def forget(self) -> None:
        """Start anew, as before the first span."""
        self.state = LayerState()

    def join(self) -> None:
        """Spans that have been packed may be read from here on."""
        self._side.join()

    def pack(
        self, blocks: Sequence[Sequence[RawBlock]], width: tuple[int, int] | None = None, again: bool = False
    ) -> list[PackedSpan]:
        """One span for each layer, from the blocks of each (`blocks[layer]`, as many tokens in all of them).

        Args:
            width: bits of keys and values; the most that the settings allow when None.
            again: these blocks have been packed before, so the method learns nothing new from them.
        """
        settings = self.settings.in_width(width or self.settings.widths[-1])
        method = self.method if settings is self.settings else replace(self.method, settings=settings)
        with self._side.work(_inputs(blocks)), self._watch:
            k = _joined([[block.k for block in own] for own in blocks])
            v = _joined([[block.v for block in own] for own in blocks])
            batch = k.shape[0] // self.layers
            if None not in self._metrics:
                metric = partial(_joined_metrics, self._metrics, batch)
                self.state.value_metric = partial(self._side.on_callers, metric)
            # Layers of a group hold the same tokens, so one rotation serves all of them.
            rotation = joined_rotation([block.rotation for block in blocks[0]])
            own = _moments(blocks)
            stats = QueryStats(own, own if self._prefilled else self.state.earlier.moment, rotation)
            tokens = self.state.tokens
            facts = call_facts(settings, k, rotation is not None)
            span = self._backend.run("encode_span", facts, method, k, v, stats, self.state)
            if rotation is not None and span.rotation is None:
                raise ValueError(
                    "a method packs keys as they are met or before RoPE, as it is told; "
                    f"method {method.name!r} forgot the rotation it was given, and this model's keys come before RoPE. "
                    "Choose another method."
                )
            if again:
                self.state.tokens = tokens
            elif self.method.uses_earlier_queries and own is not None and not self._prefilled:
                self.state.earlier.add(own, k.shape[1])
        if self.settings.cache_device == "cpu":
            span = self._offload(span)
        if self.layers == 1:
            return [span]
        parts = [slice(i * batch, (i + 1) * batch) for i in range(self.layers)]
        return [replace(span.batch_slice(part), shares=self.layers) for part in parts]

    def _offload(self, span: PackedSpan) -> PackedSpan:
        """Move what belongs to this span alone to the CPU; shared pieces stay where encoding needs them."""
        # The codebook of keys is the span's own; the state merely begins the next one with it.
        kept = [t for name, t in self.state.shared.items() if not name.startswith("k_centroids")]
        shared = {t.untyped_storage().data_ptr() for t in kept}
        own = {n: t for n, t in span.tensors.items() if t.untyped_storage().data_ptr() not in shared}
        span.tensors |= {n: moved(t, torch.device("cpu")) for n, t in own.items()}
        return span


def ready_groups(layer: LayerCache) -> list[list[int]]:
    """Entries to pack now, a list for each span: whole spans only, from the oldest on.

    An entry in which a method's window of recent tokens begins is cut in two.
    """
    s = layer.settings
    if not s.compresses:
        return []
    per_span = max(1, s.span_blocks)
    last = layer.blocks - s.keep_recent_blocks
    ready: list[int] = []
    for index, entry in enumerate(layer.entries):
        if isinstance(entry.stored, RawBlock) and s.keep_first_blocks <= entry.first < last:
            ready.append(index)
    if layer.method.recent_tokens:
        older = _older_than_recent(layer, ready) if ready else []
        return [older] if older else []
    return layer.reach.divided(ready, [layer.entries[index].first for index in ready], per_span)


def _in_spans(entries: Sequence[int], per_span: int) -> list[list[int]]:
    return [list(entries[i : i + per_span]) for i in range(0, len(entries) - per_span + 1, per_span)]


def _older_than_recent(layer: LayerCache, ready: list[int]) -> list[int]:
    """Of entries ready to be packed, those older than the method's window of recent tokens, in whole token groups.

    The entry in which the window begins is cut in two.
    """
    held = sum(layer.entries[index].stored.tokens for index in ready)
    after = sum(entry.stored.tokens for entry in layer.entries[ready[-1] + 1 :])
    take = held - max(0, layer.method.recent_tokens - after)
    take -= take % layer.method.token_group
    older = []
    for index in ready:
        if take <= 0:
            break
        if layer.entries[index].stored.tokens > take:
            layer.entries[index : index + 1] = layer.entries[index].split(take)
        older.append(index)
        take -= layer.entries[index].stored.tokens
    return older


def pack_ready(layers: Sequence[LayerCache]) -> None:
    """Pack what the settings allow, in all layers of a group; all hold the same blocks."""
    packer = layers[0].packer
    # Asked of every layer, although all answer alike: answering may cut an entry in two.
    groups = [ready_groups(layer) for layer in layers][0]
    spans = [packer.pack([[layer.entries[i].stored for i in group] for layer in layers]) for group in groups]
    # Back to front, so that indices stay valid.
    for group, packed in reversed(list(zip(groups, spans, strict=True))):
        for layer, span in zip(layers, packed, strict=True):
            layer.replace(group, span)
    for layer in layers:
        layer.settle()


def repack(layers: Sequence[LayerCache], index: int, width: tuple[int, int]) -> None:
    """Store the span of entry `index` in other bits, in all layers of a group, minding what the newest block asked."""
    blocks = [[layer.as_block(index)] for layer in layers]
    for layer, span in zip(layers, layers[0].packer.pack(blocks, width, again=True), strict=True):
        layer.exchange(index, span)


def _inputs(blocks: Sequence[Sequence[RawBlock]]) -> Iterator[torch.Tensor]:
    """All tensors that packing reads, except for the method's own."""
    for block in (block for own in blocks for block in own):
        yield from (block.k, block.v)
        if block.moment is not None:
            yield block.moment
    yield from (t for block in blocks[0] if block.rotation is not None for t in block.rotation.tensors)


def _joined_metrics(metrics: Sequence[Callable[[], torch.Tensor]], batch: int) -> torch.Tensor:
    """The metric of one layer `[H, D, D]`, or those of several, for each entry of the joined batch."""
    found = [metric() for metric in metrics]
    return found[0] if len(found) == 1 else torch.cat([metric.repeat(batch, 1, 1) for metric in found])


def _joined(tensors: list[list[torch.Tensor]]) -> torch.Tensor:
    """`[layers * B, S, H, D]`: layers along the batch, blocks along the tokens."""
    rows = [own[0] if len(own) == 1 else torch.cat(own, dim=1) for own in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _moments(blocks: Sequence[Sequence[RawBlock]]) -> torch.Tensor | None:
    """Token-weighted mean of each layer's moments `[layers * B, H, D, D]`, or None when any is missing."""
    if any(block.moment is None for own in blocks for block in own):
        return None
    means = [_mean_moment(own) for own in blocks]
    return means[0] if len(means) == 1 else torch.cat(means)


def _mean_moment(blocks: Sequence[RawBlock]) -> torch.Tensor:
    if len(blocks) == 1:
        return blocks[0].moment
    tokens = sum(block.tokens for block in blocks)
    return sum(block.moment * (block.tokens / tokens) for block in blocks)

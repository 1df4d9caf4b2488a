"""One layer's keys and values: packed spans, blocks that stay in full precision, and the way back to plain tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from . import operations  # noqa: F401  (registers the eager twins)
from .backends import Dispatcher, device_facts, settings_facts
from .methods import LayerState, Method
from .query_stats import QueryStats
from .settings import CacheSettings
from .side_stream import SideStream
from .span import PackedSpan, RawBlock, part_of, storage_bytes
from .stopwatch import Stopwatch


@dataclass
class Entry:
    """A stored piece and the lengths, in tokens, of the committed blocks in it."""

    stored: RawBlock | PackedSpan
    lengths: list[int]

    @property
    def blocks(self) -> int:
        return len(self.lengths)

    def shorten(self, stored: RawBlock | PackedSpan) -> None:
        """Keep the beginning that `stored` holds."""
        self.stored = stored
        while sum(self.lengths) > stored.tokens:
            surplus = sum(self.lengths) - stored.tokens
            last = self.lengths.pop()
            if last > surplus:
                self.lengths.append(last - surplus)


class LayerCache:
    """History of one layer. Positions are plain ints, so that nothing here has to ask the device for them.

    `append` adds tokens at the end, `commit` makes them history and packs what the settings allow, `rewind` drops
    tokens from the end, `read` gives everything back as plain tensors, `attend` attends to history and live tokens.
    """

    def __init__(
        self,
        settings: CacheSettings,
        method: Method,
        value_metric: Callable[[], torch.Tensor] | None = None,
        device: torch.device | None = None,
        encode_watch: Stopwatch | None = None,
        decode_watch: Stopwatch | None = None,
        backend: Dispatcher | None = None,
        side: SideStream | None = None,
    ) -> None:
        self.settings = settings
        self.method = method
        self.state = LayerState(value_metric)
        self.device = device
        self.entries: list[Entry] = []
        self.pending: list[RawBlock] = []
        # Sum of the moments of the passes over the block to come, and how many they were.
        self._observed: torch.Tensor | None = None
        self._passes = 0
        self.pack_events = 0
        self.workspace_bytes = 0
        self._encode_watch = encode_watch or Stopwatch()
        self._decode_watch = decode_watch or Stopwatch()
        self._backend = backend or Dispatcher(settings.backend)
        self._side = side or SideStream()
        # Set while a block of this layer is being packed beside the model.
        self._packing: torch.cuda.Event | None = None
        self._usage: Counter[str] = Counter()
        self._seen: set[int] = set()

    @property
    def end(self) -> int:
        """Tokens held, committed or not."""
        return self.committed + sum(block.tokens for block in self.pending)

    @property
    def committed(self) -> int:
        return sum(entry.stored.tokens for entry in self.entries)

    @property
    def blocks(self) -> int:
        """Committed blocks."""
        return sum(entry.blocks for entry in self.entries)

    def observe(self, queries: torch.Tensor) -> None:
        """Note queries `[B, T, H, D]` of one pass over the block that will be appended next.

        Noisy passes ask differently than the clean one, and later blocks will ask in both ways: each pass counts alike.
        """
        if self.method.uses_queries:
            self._observed = self._backend.run("second_moment", self._facts(queries), queries, self._observed)
            self._passes += 1

    def append(self, k: torch.Tensor, v: torch.Tensor, queries: torch.Tensor | None = None) -> None:
        """Add a block `[B, S, H, D]`; `queries` are those that met these keys, in the same coordinates.

        Raises:
            ValueError: when batch, heads or head width differ from what the cache holds.
        """
        self._check_shape(k, v)
        if queries is not None:
            self.observe(queries)
        self.pending.append(RawBlock(k, v, self._take_observed()))

    def commit(self) -> None:
        """Make appended blocks history, and pack every block that no setting keeps in full precision."""
        for block in self.pending:
            if self.blocks < self.settings.keep_first_blocks:
                block.moment = None  # it will never be packed
            self.entries.append(Entry(block, [block.tokens]))
        self.pending.clear()
        self._pack_ready_blocks()
        for entry in self.entries:
            self._own_storage(entry)
        self._recount_raw()

    def rewind(self, tokens: int) -> None:
        """Drop the last `tokens` tokens.

        Raises:
            ValueError: when fewer are held.
        """
        if not 0 <= tokens <= self.end:
            raise ValueError(f"rewind takes 0 to {self.end} tokens (all that the cache holds); got {tokens}.")
        self._take_observed()
        self._finish_packing()
        while tokens and self.pending:
            tokens = self._shorten(self.pending, tokens)
        stored = [entry.stored for entry in self.entries]
        before = len(stored)
        if not tokens:
            return
        while tokens:
            tokens = self._shorten(stored, tokens)
        del self.entries[len(stored) :]
        if stored:
            self.entries[-1].shorten(stored[-1])
        if not stored and before:
            self.state = LayerState(self.state.value_metric)
        self.state.tokens = min(self.state.tokens, self.committed)
        self._recount()

    def read(self, live_k: torch.Tensor | None = None, live_v: torch.Tensor | None = None):
        """Everything held, followed by the live tokens: contiguous `[B, S, H, D]` keys and values.

        The result is a workspace for one layer; drop it before reading the next one.
        """
        self._finish_packing()
        live = [] if live_k is None else [RawBlock(live_k, live_v)]
        pieces = [entry.stored for entry in self.entries] + self.pending + live
        if not pieces:
            raise ValueError("the cache is empty and no live tokens were given: nothing to read.")
        if len(pieces) == 1 and live:
            return live_k, live_v
        return self._gather(pieces)

    def attend(
        self,
        queries: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Attention of `queries` over history and the live block, all `[B, S, H, D]`; returns `[B, T, H * D]`.

        `attention(q, k, v)` is the host's own; a backend may replace it by one that gives the same up to rounding.
        """
        self._check_shape(k, v)
        self._finish_packing()
        pieces = [entry.stored for entry in self.entries] + self.pending + [RawBlock(k, v)]
        facts = self._facts(queries)
        read = partial(self.read, k, v)
        return self._backend.run("attend_packed", facts, queries, pieces, self.method, attention, read)

    def usage(self) -> Counter[str]:
        """Resident bytes by part, from real storages, each counted once.

        Besides the parts of a span: `raw` (one side kept at 16 bits), `blocks` (kept in full precision), `state`.
        """
        usage = Counter(self._usage)
        usage["state"] += self.state.nbytes(set(self._seen))
        return usage

    def packed_elements(self) -> int:
        """Scalars (of keys and values) stored in fewer than 16 bits."""
        total = 0
        for span in self._spans():
            sides = (span.key_bits != 16) + (span.value_bits != 16)
            total += sides * span.batch * span.tokens * span.heads * span.head_dim
        return total

    def _spans(self) -> Iterator[PackedSpan]:
        return (entry.stored for entry in self.entries if isinstance(entry.stored, PackedSpan))

    def _check_shape(self, k: torch.Tensor, v: torch.Tensor) -> None:
        held = next((entry.stored for entry in self.entries), None) or next(iter(self.pending), None)
        if k.ndim != 4 or k.shape != v.shape:
            raise ValueError(f"keys and values must share a shape [B, S, H, D]; got {k.shape} and {v.shape}.")
        if held is None:
            return
        if isinstance(held, PackedSpan):
            expected = (held.batch, held.heads, held.head_dim)
        else:
            expected = (held.k.shape[0], *held.k.shape[2:])
        if (k.shape[0], *k.shape[2:]) != expected:
            raise ValueError(
                f"every block of a cache needs the same batch, heads and head width {expected}; "
                f"got {(k.shape[0], *k.shape[2:])}. With classifier-free guidance the batch changes: set cfg to 1."
            )

    def _pack_ready_blocks(self) -> None:
        s = self.settings
        per_span = max(1, s.span_blocks)
        last = self.blocks - s.keep_recent_blocks
        ready: list[int] = []
        block = 0
        for index, entry in enumerate(self.entries):
            if isinstance(entry.stored, RawBlock) and s.keep_first_blocks <= block < last:
                ready.append(index)
            block += entry.blocks
        # Whole spans only, from the oldest on; replaced back to front so that indices stay valid.
        groups = [ready[i : i + per_span] for i in range(0, len(ready) - per_span + 1, per_span)]
        packed = [(group, self._pack([self.entries[i].stored for i in group])) for group in groups]
        for group, span in reversed(packed):
            lengths = [length for i in group for length in self.entries[i].lengths]
            self.entries[group[0] : group[-1] + 1] = [Entry(span, lengths)]

    def _take_observed(self) -> torch.Tensor | None:
        """Mean moment of the passes noted so far; starts anew."""
        total, passes = self._observed, self._passes
        self._observed, self._passes = None, 0
        return total.div_(passes) if total is not None else None

    def _pack(self, blocks: list[RawBlock]) -> PackedSpan:
        inputs = [t for block in blocks for t in (block.k, block.v, block.moment) if t is not None]
        with self._own_metric() as metric, self._side.beside([*inputs, *metric]), self._encode_watch:
            span = self._encode(blocks)
            if self.settings.cache_device == "cpu":
                span = self._offload(span)
        self._packing = self._side.hand_over(span.tensors.values())
        self.pack_events += 1
        self._count(span)
        return span

    def _encode(self, blocks: list[RawBlock]) -> PackedSpan:
        k, v = blocks[0].k, blocks[0].v
        if len(blocks) > 1:
            k = torch.cat([block.k for block in blocks], dim=1)
            v = torch.cat([block.v for block in blocks], dim=1)
        stats = QueryStats(own=_mean_moment(blocks), earlier=self.state.earlier.moment)
        span = self._backend.run("encode_span", self._facts(k), self.method, k, v, stats, self.state)
        if self.method.uses_earlier_queries and stats.own is not None:
            self.state.earlier.add(stats.own, k.shape[1])
        return span

    @contextmanager
    def _own_metric(self) -> Iterator[list[torch.Tensor]]:
        """Ask for the output projection's metric here if the encoder will: it runs the model, on the model's stream."""
        ask = self.state.value_metric
        if ask is None or not self.method.wants_value_metric(self.state):
            yield []
            return
        metric = ask()
        self.state.value_metric = lambda: metric
        try:
            yield [metric]
        finally:
            self.state.value_metric = ask

    def _finish_packing(self) -> None:
        """Let what follows wait for the block that is being packed."""
        if self._packing is not None:
            torch.cuda.current_stream(self.device).wait_event(self._packing)
            self._packing = None

    def _facts(self, like: torch.Tensor) -> dict:
        """What backends are chosen by, for a call on tensors `[B, S, H, D]`."""
        batch, tokens, heads, head_dim = like.shape
        shape = {"batch": batch, "tokens": tokens, "heads": heads, "head_dim": head_dim, "dtype": like.dtype}
        return settings_facts(self.settings) | shape | device_facts(like.device)

    def _offload(self, span: PackedSpan) -> PackedSpan:
        """Move what belongs to this span alone to the CPU; shared pieces stay where encoding needs them."""
        shared = {t.untyped_storage().data_ptr() for t in self.state.shared.values()}
        own = {n: t for n, t in span.tensors.items() if t.untyped_storage().data_ptr() not in shared}
        span.tensors |= {n: t.to("cpu") for n, t in own.items()}
        return span

    def _gather(self, pieces: list[RawBlock | PackedSpan]) -> tuple[torch.Tensor, torch.Tensor]:
        first = pieces[0]
        if isinstance(first, PackedSpan):
            batch, heads, width, dtype = first.batch, first.heads, first.head_dim, first.dtype
            device = self.device or next(iter(first.tensors.values())).device
        else:
            batch, heads, width, dtype = first.k.shape[0], *first.k.shape[2:], first.k.dtype
            device = first.k.device
        total = sum(piece.tokens for piece in pieces)
        keys, values = torch.empty(2, batch, total, heads, width, dtype=dtype, device=device)
        self.workspace_bytes = max(self.workspace_bytes, 2 * keys.numel() * keys.element_size())
        with self._decode_watch:
            self._backend.run("decode_layer", self._facts(keys), self.method, pieces, keys, values)
        return keys, values

    @staticmethod
    def _shorten(pieces: list, tokens: int) -> int:
        """Drop up to `tokens` tokens of the last piece; returns how many are left to drop."""
        last = pieces[-1]
        if last.tokens <= tokens:
            pieces.pop()
            return tokens - last.tokens
        pieces[-1] = last.narrow(last.tokens - tokens)
        return 0

    def _own_storage(self, entry: Entry) -> None:
        """A block that stays must not keep a larger tensor alive through a view."""
        block = entry.stored
        if isinstance(block, RawBlock) and block.k.untyped_storage().nbytes() > block.k.nbytes:
            entry.stored = RawBlock(block.k.clone(), block.v.clone(), block.moment)

    def _recount(self) -> None:
        self._usage.clear()
        self._seen.clear()
        for span in self._spans():
            self._count(span)
        self._recount_raw()

    def _count(self, span: PackedSpan) -> None:
        for name, tensor in span.tensors.items():
            self._usage[part_of(name)] += storage_bytes((tensor,), self._seen)

    def _recount_raw(self) -> None:
        blocks = [entry.stored for entry in self.entries if isinstance(entry.stored, RawBlock)]
        tensors = [t for b in blocks for t in (b.k, b.v, b.moment) if t is not None]
        self._usage["blocks"] = storage_bytes(tensors)


def _mean_moment(blocks: list[RawBlock]) -> torch.Tensor | None:
    """Token-weighted mean of the blocks' moments, or None when any is missing."""
    if any(block.moment is None for block in blocks):
        return None
    if len(blocks) == 1:
        return blocks[0].moment
    tokens = sum(block.tokens for block in blocks)
    return sum(block.moment * (block.tokens / tokens) for block in blocks)

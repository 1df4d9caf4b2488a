"""One layer's keys and values: packed spans, blocks that stay in full precision, and the way back to plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from . import operations  # noqa: F401  (registers the eager twins)
from .backends import Dispatcher, call_facts
from .compiling import uncompiled
from .entry import Entry
from .holdings import Holdings
from .methods import Method
from .packing import Packer, Reach, pack_ready
from .prefetch import LayerFetch
from .rotation import Rotation, check_rotation
from .settings import CacheSettings
from .span import PackedSpan, RawBlock
from .stopwatch import Stopwatch

if TYPE_CHECKING:
    from .head_groups import HeadGroups


class LayerCache(Holdings):
    """History of one layer. Positions are plain ints, so that nothing here has to ask the device for them.

    `append` adds tokens at the end, `commit` makes them history and packs what the settings allow, `rewind` drops
    tokens from the end, `read` gives everything back as plain tensors, `attend` attends to history and live tokens.
    `Holdings` has what leaves and comes back, and the bytes of all.
    """

    def __init__(
        self,
        settings: CacheSettings,
        method: Method,
        value_metric: Callable[[], torch.Tensor] | None = None,
        device: torch.device | None = None,
        decode_watch: Stopwatch | None = None,
        backend: Dispatcher | None = None,
        packer: Packer | None = None,
        reach: Reach | None = None,
    ) -> None:
        backend = backend or Dispatcher(settings.backend)
        # Shared with the other layers of a group; a layer alone has one of its own.
        packer = packer or Packer(settings, method, [value_metric], backend, Stopwatch(device))
        super().__init__(settings, device, packer)
        self.reach = reach or Reach()
        self.method = method
        self._backend = backend
        self.keeps_means = False
        # With a budget: how the newest block asked, until bits have been chosen.
        self.newest_moment: torch.Tensor | None = None
        self.following: LayerCache | HeadGroups | None = None
        self._fetch: LayerFetch | None = None
        # Sum of the moments of the passes over the block to come, and how many they were.
        self._observed: torch.Tensor | None = None
        self._passes = 0
        self.pack_events = 0
        self.workspace_bytes = 0
        self._decode_watch = decode_watch or Stopwatch()

    @property
    def rehearses(self) -> bool:
        """Whether it wants to see noisy queries before given frames are packed."""
        return self.method.rehearses

    def fetch_ahead(self, following: LayerCache | HeadGroups, device: torch.device, stream) -> None:
        """While this layer attends, copy what `following` keeps on the CPU to `device`, on the side stream `stream`."""
        self.following = following
        self._fetch = LayerFetch(device, stream)

    def release(self) -> None:
        """Let go of the layer that follows: the last layer is followed by the first, and a ring is freed late."""
        self.following = None

    def start_fetch(self) -> None:
        """Begin to copy this layer's history to the device; see `fetch_ahead`."""
        if self._fetch is not None:
            self._fetch.start(self._history())

    def observe(self, queries: torch.Tensor) -> None:
        """Note queries `[B, T, H, D]` of one pass over the block that will be appended next.

        Noisy passes ask differently than the clean one, and later blocks will ask in both ways: each pass counts alike.
        """
        if self.method.uses_queries:
            facts = call_facts(self.settings, queries)
            self._observed = self._backend.run("second_moment", facts, queries, self._observed)
            self._passes += 1

    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: torch.Tensor | None = None,
        lengths: Sequence[int] | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        """Add a block `[B, S, H, D]`; `queries` are those that met these keys, as attention multiplies them.

        Args:
            lengths: add it as several blocks of so many tokens each.
            rotation: `k` are keys before this RoPE, queries are after theirs. Give all layers the same object: its
                tables are kept once. Reading and attending gives keys after RoPE; live keys always come after it.

        Raises:
            ValueError: when batch, heads or head width differ from what the cache holds, when the rotation does not
                fit, or when the settings cannot work on keys before RoPE.
        """
        self._check_shape(k, v)
        if rotation is not None:
            self._check_rotation(k, rotation)
        if queries is not None:
            self.observe(queries)
        moment = self._take_observed()
        lengths = list(lengths or (k.shape[1],))
        whole = RawBlock(k, v, moment, rotation)
        ends = list(accumulate(lengths))
        self.pending += [whole.cut(slice(end - length, end)) for end, length in zip(ends, lengths)]

    @uncompiled
    def commit(self) -> None:
        """Make appended blocks history, and pack every block that no setting keeps in full precision."""
        self.make_history()
        pack_ready([self])

    def make_history(self) -> None:
        """Make appended blocks history, still in full precision; for layers that pack together."""
        if self.settings.budget_gb and self.pending:
            self.newest_moment = self.pending[-1].moment
        for block in self.pending:
            if self.blocks < self.settings.keep_first_blocks:
                block.moment = None  # it will never be packed
            mean = block.turned_k.float().mean(1) if self.keeps_means else None
            self.entries.append(Entry(block, [block.tokens], self.blocks, mean_key=mean))
        self.pending.clear()
        self._recount_raw()

    def rewind(self, tokens: int) -> None:
        """Drop the last `tokens` tokens.

        Raises:
            ValueError: when fewer are held.
        """
        if not 0 <= tokens <= self.end:
            raise ValueError(f"rewind takes 0 to {self.end} tokens (all that the cache holds); got {tokens}.")
        self.packer.join()
        self._take_observed()
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
            self.packer.forget()
        self.state.tokens = min(self.state.tokens, self.committed)
        self._recount()

    def evict(self, start: int, tokens: int) -> None:
        """Drop `tokens` tokens of the history within reach, counted from its token `start`, be it inside of blocks.

        Raises:
            ValueError: when the history ends before them.
        """
        stop = start + tokens
        if not 0 <= start <= stop <= self.committed:
            raise ValueError(f"evict takes tokens of the {self.committed} in reach; got those from {start} to {stop}.")
        self.packer.join()
        blocks, kept, begin = self.blocks, [], 0
        for entry in self.entries:
            end = begin + entry.stored.tokens
            first, last = max(start, begin), min(stop, end)
            kept += entry.without(first - begin, last - begin) if first < last else [entry]
            begin = end
        self.entries = kept
        self._retired += blocks - self.blocks
        self._recount()

    def read(self, live_k: torch.Tensor | None = None, live_v: torch.Tensor | None = None):
        """Everything within reach, followed by the live tokens: contiguous `[B, S, H, D]` keys and values.

        The result is a workspace for one layer; drop it before reading the next one.
        """
        live = [] if live_k is None else [RawBlock(live_k, live_v)]
        pieces = self._history() + live
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
        return self.attend_each([(queries, k, v)], attention)

    def attend_each(
        self,
        prompts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """As `attend`, for several prompts (queries, keys, values) that ask one history, which is read once for all.

        Returns their outputs, one after the other in the batch.
        """
        for _, k, v in prompts:
            self._check_shape(k, v)
        history = self._fetched_history()
        if self.settings.budget_gb:
            # Positions are part of the keys: spans of one width come together, so that a kernel reads them in one go.
            history.sort(key=_width)
        if self.following is not None:
            self.following.start_fetch()
        decoded: tuple[torch.Tensor, torch.Tensor] | None = None

        def read(first: bool, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """The history followed by these live tokens, which take the place of those of the prompt before."""
            nonlocal decoded
            if not history:
                return k, v
            # For the first prompt at every call, so that a backend that times reading times decoding.
            if first or decoded is None:
                decoded = None  # before the next one, for there may be no room for two
                decoded = self._gather([*history, RawBlock(k, v)])
            else:
                for whole, live in zip(decoded, (k, v)):
                    whole[:, -live.shape[1] :] = live
            return decoded

        outs = []
        for queries, k, v in prompts:
            pieces = [*history, RawBlock(k, v)]
            facts = call_facts(self.settings, queries, _rotated(pieces))
            reads = partial(read, not outs, k, v)
            outs.append(self._backend.run("attend_packed", facts, queries, pieces, self.method, attention, reads))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _history(self) -> list[RawBlock | PackedSpan]:
        """Pieces within reach, for reading."""
        self.packer.join()
        return [*self.recalled.values(), *(entry.stored for entry in self.entries), *self.pending]

    def _fetched_history(self) -> list[RawBlock | PackedSpan]:
        """Pieces within reach, on the device where the cache fetches ahead."""
        history = self._history()
        return history if self._fetch is None else self._fetch.take(history)

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

    def _check_rotation(self, k: torch.Tensor, rotation: Rotation) -> None:
        check_rotation(self.settings)
        if rotation.cos.shape != (k.shape[1], k.shape[3] / 2) or rotation.cos.device != k.device:
            raise ValueError(
                "a rotation has an angle for every token and pair of channels, and is where the keys are; got "
                f"{list(rotation.cos.shape)} on {rotation.cos.device} for keys {list(k.shape)} on {k.device}. "
                "Cut it to the block's tokens."
            )

    def replace(self, group: list[int], span: PackedSpan) -> None:
        """Put a span in the place of the entries it was packed from."""
        packed = Entry.joined([self.entries[i] for i in group], span)
        self.entries[group[0] : group[-1] + 1] = [packed]
        self.pack_events += 1
        self._count(span)

    def decoded(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, S, H, D]` of the entry `index`, on the device where the cache is read."""
        self.packer.join()
        return self._gather([self.entries[index].stored])

    def as_block(self, index: int) -> RawBlock:
        """The entry `index` as a block to be packed anew for the newest block's queries."""
        keys, values = self.decoded(index)
        rotation = self.entries[index].stored.rotation
        if rotation is not None:
            keys = rotation.undo(keys)
        return RawBlock(keys, values, self.newest_moment, rotation)

    def exchange(self, index: int, span: PackedSpan) -> None:
        """Put a span in the place of another one of the same tokens."""
        self.entries[index].stored = span
        self.pack_events += 1
        self._recount()

    def settle(self) -> None:
        """Count blocks that stay in full precision, and let them own their memory."""
        for entry in self.entries:
            self._own_storage(entry)
        self._recount_raw()

    def _take_observed(self) -> torch.Tensor | None:
        """Mean moment of the passes noted so far; starts anew."""
        total, passes = self._observed, self._passes
        self._observed, self._passes = None, 0
        return total.div_(passes) if total is not None else None

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
            facts = call_facts(self.settings, keys, _rotated(pieces))
            self._backend.run("decode_layer", facts, self.method, pieces, keys, values)
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
            entry.stored = block.owning_storage()


def _rotated(pieces: Sequence[RawBlock | PackedSpan]) -> bool:
    return any(piece.rotation is not None for piece in pieces)


def _width(piece: RawBlock | PackedSpan) -> tuple[int, int]:
    """Bits of keys and values; blocks in full precision come last."""
    return (piece.key_bits, piece.value_bits) if isinstance(piece, PackedSpan) else (32, 32)

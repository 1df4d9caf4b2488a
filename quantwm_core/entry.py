"""One stored piece of a layer's history, and the blocks that it holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from .prefetch import moved, piece_on
from .span import PackedSpan, RawBlock


@dataclass
class Entry:
    """A stored piece, the lengths, in tokens, of the committed blocks in it, and the number of the first of them.

    continues: the first of them began in the entry before.
    mean_key: `[B, H, D]` where blocks are to be found again by it.
    """

    stored: RawBlock | PackedSpan
    lengths: list[int]
    first: int = 0
    continues: bool = False
    mean_key: torch.Tensor | None = None

    @property
    def blocks(self) -> int:
        """Blocks that begin here."""
        return len(self.lengths) - self.continues

    def split(self, tokens: int) -> list[Entry]:
        """A block in full precision as its first `tokens` tokens and the rest."""
        first, rest = self.stored.cut(slice(tokens)), self.stored.cut(slice(tokens, None))
        return [
            Entry(first, [first.tokens], self.first, self.continues, self.mean_key),
            Entry(rest, [rest.tokens], self.first, True, self.mean_key),
        ]

    @property
    def numbers(self) -> range:
        """Numbers of the blocks that it holds or holds a part of, counted from the start of the run."""
        return range(self.first, self.first + len(self.lengths))

    def shorten(self, stored: RawBlock | PackedSpan) -> None:
        """Keep the beginning that `stored` holds."""
        self.stored = stored
        while sum(self.lengths) > stored.tokens:
            surplus = sum(self.lengths) - stored.tokens
            last = self.lengths.pop()
            if last > surplus:
                self.lengths.append(last - surplus)

    def without(self, start: int, stop: int) -> list[Entry]:
        """What is left without the tokens from `start` to `stop`: nothing, one entry, or two."""
        left = []
        if start > 0:
            before = Entry(self.stored, list(self.lengths), self.first, self.continues)
            before.shorten(self.stored.narrow(start))
            left.append(before)
        if stop < self.stored.tokens:
            lengths, cut = list(self.lengths), stop
            while cut >= lengths[0]:
                cut -= lengths.pop(0)
            first = self.first + len(self.lengths) - len(lengths)
            lengths[0] -= cut
            left.append(Entry(self.stored.tail(stop), lengths, first, cut > 0 or (stop == 0 and self.continues)))
        return left

    @classmethod
    def joined(cls, entries: Sequence[Entry], span: PackedSpan) -> Entry:
        """One entry in the place of several, for the span they were packed into."""
        lengths: list[int] = []
        for entry in entries:
            own = list(entry.lengths)
            if entry.continues and lengths:
                lengths[-1] += own.pop(0)
            lengths += own
        oldest = entries[0]
        return cls(span, lengths, oldest.first, oldest.continues, mean_key(entries))


def tensors_of(piece: RawBlock | PackedSpan) -> list[torch.Tensor]:
    """What a piece stores."""
    return [piece.k, piece.v] if isinstance(piece, RawBlock) else list(piece.tensors.values())


def mean_key(entries: Sequence[Entry]) -> torch.Tensor | None:
    """Token-weighted mean of the entries' mean keys, where they have them."""
    if len(entries) == 1 or entries[0].mean_key is None:
        return entries[0].mean_key
    tokens = sum(entry.stored.tokens for entry in entries)
    return sum(entry.mean_key * (entry.stored.tokens / tokens) for entry in entries)


def storages_of(span: PackedSpan) -> set[int]:
    """Addresses of a span's storages."""
    return {tensor.untyped_storage().data_ptr() for tensor in span.tensors.values()}


def moved_piece(
    stored: RawBlock | PackedSpan, device: torch.device, staying: Collection[int] = ()
) -> RawBlock | PackedSpan:
    """The same piece on `device`, except for tensors whose storage is in `staying`; itself where nothing moves."""
    if isinstance(stored, RawBlock):
        return piece_on(stored, device)
    own = {n: t for n, t in stored.tensors.items() if t.untyped_storage().data_ptr() not in staying}
    if all(t.device == device for t in own.values()):
        return stored
    return replace(stored, tensors=stored.tensors | {name: moved(t, device) for name, t in own.items()})

"""What one layer holds: blocks in reach, a bank of those that left, what came back from it; and the bytes of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from .entry import Entry, moved_piece, storages_of, tensors_of
from .methods import LayerState
from .packing import Packer
from .settings import CacheSettings
from .span import PackedSpan, RawBlock, part_of, shares_of, storage_bytes


class Holdings:
    """`retire` takes blocks out of reach, for good or into a bank from which `recall` brings them back.

    Positions are part of the keys, so history may have gaps and any order.
    """

    def __init__(self, settings: CacheSettings, device: torch.device | None, packer: Packer) -> None:
        self.settings = settings
        self.device = device
        self.packer = packer
        self.entries: list[Entry] = []
        self.pending: list[RawBlock] = []
        self.bank: list[Entry] = []
        # By the number of the first block and what the bank holds.
        self.recalled: dict[tuple[int, int], RawBlock | PackedSpan] = {}
        self._retired = 0
        self._leaving: set[int] = set()
        self._forgotten: set[int] = set()
        self._usage: Counter[str] = Counter()
        self._seen: set[int] = set()

    @property
    def end(self) -> int:
        """Tokens within reach, committed or not."""
        return self.committed + sum(block.tokens for block in self.pending)

    @property
    def committed(self) -> int:
        return sum(entry.stored.tokens for entry in self.entries)

    @property
    def blocks(self) -> int:
        """Committed blocks, retired ones included."""
        return self._retired + sum(entry.blocks for entry in self.entries)

    @property
    def tokens(self) -> int:
        """Tokens stored for history, within reach or in the bank."""
        return self.committed + sum(entry.stored.tokens for entry in self.bank)

    @property
    def state(self) -> LayerState:
        """What the method remembers between spans, for all layers that pack together."""
        return self.packer.state

    def retire(self, blocks: Collection[int], bank: torch.device | None = None) -> None:
        """Take blocks, by number, out of reach: away for good, or packed as they are into a bank on device `bank`.

        A span of several blocks leaves when all of them are to leave.
        """
        self.packer.join()
        self._leaving.update(blocks)
        out = [entry for entry in self.entries if self._leaving.issuperset(entry.numbers)]
        if not out:
            return
        self.entries = [entry for entry in self.entries if not self._leaving.issuperset(entry.numbers)]
        self._retired += sum(entry.blocks for entry in out)
        self._leaving.intersection_update(number for entry in self.entries for number in entry.numbers)
        if bank is not None:
            out = [entry for entry in out if not self._forgotten.issuperset(entry.numbers)]
            shared = self._shared_storages(out)
            self.bank += [replace(entry, stored=moved_piece(entry.stored, bank, shared)) for entry in out]
        self._recount()

    def forget(self, blocks: Collection[int]) -> None:
        """Drop blocks, by number, from the bank; a span of several when all of them are to go."""
        self._forgotten.update(blocks)
        self.bank = [entry for entry in self.bank if not self._forgotten.issuperset(entry.numbers)]
        self._recount()

    def recall(self, blocks: Collection[int]) -> None:
        """Bring the bank's pieces that hold these blocks, and no others, back into reach, until the next call."""
        chosen = [entry for entry in self.bank if not set(blocks).isdisjoint(entry.numbers)]
        # Parts of one block share its number.
        wanted = {(entry.first, id(entry.stored)): entry.stored for entry in chosen}
        if self.device is not None and self.settings.cache_device == "gpu":
            wanted = {key: self.recalled.get(key) or moved_piece(stored, self.device) for key, stored in wanted.items()}
        self.recalled = wanted
        self._recount()

    def recall_similar(self, queries: torch.Tensor, count: int) -> None:
        """Recall the `count` pieces of the bank whose mean key has the largest product with the mean query.

        `queries` `[B, T, H, D]`; needs `keeps_means`. Asks the device for the answer.
        """
        if self.bank:
            means = torch.stack([entry.mean_key for entry in self.bank])
            scores = torch.einsum("nbhd,bhd->n", means, queries.float().mean(1))
            best = scores.topk(min(count, len(self.bank))).indices.tolist()
            self.recall([number for index in best for number in self.bank[index].numbers])

    def usage(self, counted: set[int] | None = None) -> Counter[str]:
        """Resident bytes by part, from real storages, each counted once.

        Besides the parts of a span: `raw` (one side kept at 16 bits), `blocks` (kept in full precision), `state`.

        Args:
            counted: storages of rotations, which all layers share, that were counted with layers before; added to.
        """
        usage = Counter(self._usage)
        turns = [stored.rotation for stored in self._stored() if stored.rotation is not None]
        shared = storage_bytes((t for turn in turns for t in turn.tensors), counted)
        own = self.state.nbytes(set(self._seen)) // self.packer.layers
        usage["state"] += own + shared + storage_bytes(self._means())
        return usage

    def bank_bytes(self) -> int:
        """Bytes of what only the bank refers to: neither within reach nor shared with what is."""
        if not self.bank:
            return 0
        pieces = [*self.recalled.values(), *(entry.stored for entry in self.entries)]
        seen: set[int] = set()
        storage_bytes([*self.state.tensors(), *(t for piece in pieces for t in tensors_of(piece))], seen)
        return sum(storage_bytes(tensors_of(entry.stored), seen, shares_of(entry.stored)) for entry in self.bank)

    def packed_elements(self) -> int:
        """Scalars (of keys and values) stored in fewer than 16 bits."""
        total = 0
        for entry in self.entries + self.bank:
            span = entry.stored
            if not isinstance(span, PackedSpan):
                continue
            sides = (span.key_bits != 16) + (span.value_bits != 16)
            total += sides * span.batch * span.tokens * span.heads * span.head_dim
        return total

    def _stored(self) -> Iterator[RawBlock | PackedSpan]:
        """Everything that takes memory; what was recalled where it lies appears twice."""
        yield from (entry.stored for entry in self.entries + self.bank)
        yield from self.recalled.values()

    def _spans(self) -> Iterator[PackedSpan]:
        return (stored for stored in self._stored() if isinstance(stored, PackedSpan))

    def _means(self) -> list[torch.Tensor]:
        return [entry.mean_key for entry in self.entries + self.bank if entry.mean_key is not None]

    def _shared_storages(self, leaving: list[Entry]) -> set[int]:
        """Storages that other spans or the method refer to as well: they stay where they are, once."""
        count = Counter(p for span in self._spans() for p in storages_of(span))
        count.update(p for entry in leaving if isinstance(entry.stored, PackedSpan) for p in storages_of(entry.stored))
        count.update(t.untyped_storage().data_ptr() for t in self.state.tensors())
        return {pointer for pointer, times in count.items() if times > 1}

    def _recount(self) -> None:
        self._usage.clear()
        self._seen.clear()
        for span in self._spans():
            self._count(span)
        self._recount_raw()

    def _count(self, span: PackedSpan) -> None:
        for name, tensor in span.tensors.items():
            self._usage[part_of(name)] += storage_bytes((tensor,), self._seen, span.shares)

    def _recount_raw(self) -> None:
        blocks = [stored for stored in self._stored() if isinstance(stored, RawBlock)]
        tensors = [t for b in blocks for t in (b.k, b.v, b.moment) if t is not None]
        self._usage["blocks"] = storage_bytes(tensors)

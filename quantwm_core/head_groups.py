"""A layer whose heads are stored in different bit widths: one cache for each group of heads, behind the same face."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from .entry import Entry
from .layer_cache import LayerCache
from .rotation import Rotation


@dataclass
class HeadGroup:
    """Some heads of a layer, by their numbers, and their cache."""

    heads: list[int]
    cache: LayerCache

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """This group's heads of `x` `[B, S, H, D]`."""
        return x[:, :, self.heads]


class HeadGroups:
    """Stands in for a `LayerCache`. Heads attend independently, so each group appends, packs and attends by itself."""

    def __init__(self, groups: list[HeadGroup]) -> None:
        self.groups = groups

    @property
    def caches(self) -> list[LayerCache]:
        return [group.cache for group in self.groups]

    @property
    def end(self) -> int:
        return self.caches[0].end

    @property
    def committed(self) -> int:
        return self.caches[0].committed

    @property
    def blocks(self) -> int:
        return self.caches[0].blocks

    @property
    def tokens(self) -> int:
        return self.caches[0].tokens

    @property
    def rehearses(self) -> bool:
        return any(cache.rehearses for cache in self.caches)

    @property
    def bank(self) -> list[Entry]:
        return self.caches[0].bank

    @property
    def keeps_means(self) -> bool:
        return self.caches[0].keeps_means

    @keeps_means.setter
    def keeps_means(self, wanted: bool) -> None:
        for cache in self.caches:
            cache.keeps_means = wanted

    @property
    def pack_events(self) -> int:
        """As many as the busiest group has: all groups of a block are packed together."""
        return max(cache.pack_events for cache in self.caches)

    @property
    def workspace_bytes(self) -> int:
        """Groups are decoded one after the other."""
        return max(cache.workspace_bytes for cache in self.caches)

    def fetch_ahead(self, following: LayerCache | HeadGroups, device: torch.device, stream) -> None:
        """See `LayerCache.fetch_ahead`; the first group to attend starts what follows."""
        for cache in self.caches:
            cache.fetch_ahead(following, device, stream)
            cache.following = None
        self.caches[0].following = following

    def release(self) -> None:
        """See `LayerCache.release`."""
        for cache in self.caches:
            cache.release()

    def start_fetch(self) -> None:
        """See `LayerCache.start_fetch`."""
        for cache in self.caches:
            cache.start_fetch()

    def observe(self, queries: torch.Tensor) -> None:
        """See `LayerCache.observe`."""
        for group in self.groups:
            group.cache.observe(group.take(queries))

    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: torch.Tensor | None = None,
        lengths: Sequence[int] | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        """See `LayerCache.append`."""
        for group in self.groups:
            asked = None if queries is None else group.take(queries)
            group.cache.append(group.take(k), group.take(v), asked, lengths, rotation)

    def commit(self) -> None:
        """See `LayerCache.commit`."""
        for cache in self.caches:
            cache.commit()

    def rewind(self, tokens: int) -> None:
        """See `LayerCache.rewind`."""
        for cache in self.caches:
            cache.rewind(tokens)

    def evict(self, start: int, tokens: int) -> None:
        """See `LayerCache.evict`."""
        for cache in self.caches:
            cache.evict(start, tokens)

    def retire(self, blocks: Collection[int], bank: torch.device | None = None) -> None:
        """See `LayerCache.retire`."""
        for cache in self.caches:
            cache.retire(blocks, bank)

    def recall(self, blocks: Collection[int]) -> None:
        """See `LayerCache.recall`."""
        for cache in self.caches:
            cache.recall(blocks)

    def recall_similar(self, queries: torch.Tensor, count: int) -> None:
        """See `LayerCache.recall_similar`; each group finds its own."""
        for group in self.groups:
            group.cache.recall_similar(group.take(queries), count)

    def forget(self, blocks: Collection[int]) -> None:
        """See `LayerCache.forget`."""
        for cache in self.caches:
            cache.forget(blocks)

    def read(self, live_k: torch.Tensor | None = None, live_v: torch.Tensor | None = None):
        """See `LayerCache.read`."""
        live = [(None, None) if live_k is None else (g.take(live_k), g.take(live_v)) for g in self.groups]
        parts = [group.cache.read(*each) for group, each in zip(self.groups, live)]
        return tuple(self._together([part[side] for part in parts]) for side in (0, 1))

    def attend(
        self,
        queries: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """See `LayerCache.attend`; `attention` is called with fewer heads."""
        return self.attend_each([(queries, k, v)], attention)

    def attend_each(
        self,
        prompts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """See `LayerCache.attend_each`."""
        parts = []
        for group in self.groups:
            taken = [tuple(group.take(tensor) for tensor in prompt) for prompt in prompts]
            out = group.cache.attend_each(taken, attention)
            parts.append(out.unflatten(2, (len(group.heads), -1)))
        return self._together(parts).flatten(2)

    def usage(self, counted: set[int] | None = None) -> Counter[str]:
        """See `LayerCache.usage`; the groups share rotations and no other storage."""
        counted = set() if counted is None else counted
        return sum((cache.usage(counted) for cache in self.caches), Counter())

    def bank_bytes(self) -> int:
        """See `LayerCache.bank_bytes`."""
        return sum(cache.bank_bytes() for cache in self.caches)

    def packed_elements(self) -> int:
        """See `LayerCache.packed_elements`."""
        return sum(cache.packed_elements() for cache in self.caches)

    def _together(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Parts `[B, S, heads of the group, D]` as one tensor, heads in their order."""
        batch, tokens, _, width = parts[0].shape
        heads = sum(len(group.heads) for group in self.groups)
        whole = parts[0].new_empty(batch, tokens, heads, width)
        for group, part in zip(self.groups, parts):
            whole[:, :, group.heads] = part
        return whole

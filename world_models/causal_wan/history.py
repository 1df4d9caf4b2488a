"""What a sampler does to the history of a run beside adding to it: blocks leave, on the host's cache or on ours."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from ...quantwm_core.memory import MemorySettings, kept_tokens, take_tokens
from ...quantwm_core.window import Block
from .run import PackedLayer
from .streams import CacheStreams


class History(Protocol):
    """The history of one run, as the sampler sees it. Blocks go by their numbers."""

    def announce_clean_pass(self, frames: Sequence[int]) -> None:
        """The coming pass makes history, whatever its noise level: blocks of so many frames each."""

    def add(self, blocks: Sequence[Block]) -> None:
        """These blocks have just been stored."""

    def retire(self, blocks: Collection[int]) -> None:
        """Take blocks out of reach, into the bank where there is one."""

    def recall(self, blocks: Collection[int]) -> None:
        """Bring blocks back from the bank for the coming block, and send others that had come back away."""

    def recall_similar(self) -> None:
        """Let each layer bring back what fits the coming block's queries."""

    def forget(self, blocks: Collection[int]) -> None:
        """Drop blocks from the bank."""


def open_history(
    streams: CacheStreams, memory: MemorySettings | None, frame_tokens: int, device: torch.device
) -> History:
    """The history in what `init_kv_caches` gave, for all conditionings: our packed layers, or the host's tensors."""
    bank = None
    if memory is not None and memory.retrieves:
        bank = torch.device("cpu") if memory.bank_device == "cpu" else device
    if isinstance(streams.caches[0], PackedLayer):
        return PackedHistory(streams, bank, frame_tokens)
    return HostHistory(streams, bank, memory.keep if memory else 1.0, frame_tokens)


class HostHistory:
    """The host's dictionaries of `k`, `v` and `end`: gaps are closed at once, what comes back goes behind the end.

    Positions are part of the keys, so the order in memory is free. A bank lies in the same dictionaries.
    """

    def __init__(self, streams: CacheStreams, bank: torch.device | None, keep: float, frame_tokens: int) -> None:
        self._streams = streams
        self._bank = bank
        self._keep = keep
        self._frame_tokens = frame_tokens
        # Tokens of each block in reach, in the order in which they lie.
        self._held: dict[int, int] = {}
        self._recalled: set[int] = set()

    @property
    def _caches(self) -> list[dict]:
        return self._streams.caches

    def announce_clean_pass(self, frames: Sequence[int]) -> None:
        self._streams.announce_clean_pass()

    def add(self, blocks: Sequence[Block]) -> None:
        """Note blocks behind the end, and leave the tokens out that compression drops."""
        sizes = kept_sizes = [block.frames * self._frame_tokens for block in blocks]
        for cache in self._caches if self._keep < 1 else ():
            start = kept_end = cache["end"] - sum(sizes)
            kept_sizes = []
            for size in sizes:
                k, v = (cache[side][:, start : start + size].clone() for side in ("k", "v"))
                tokens = kept_tokens(k, self._frame_tokens, self._keep)
                if tokens is not None:
                    k, v = take_tokens(k, tokens), take_tokens(v, tokens)
                self._write(cache, kept_end, k, v)
                start, kept_end = start + size, kept_end + k.shape[1]
                kept_sizes.append(k.shape[1])
            cache["end"] = kept_end
        self._held |= dict(zip((block.number for block in blocks), kept_sizes))

    def retire(self, blocks: Collection[int]) -> None:
        for number in blocks:
            if self._bank is not None:
                part = self._part(number)
                for cache in self._caches:
                    held = (cache[side][:, part].to(self._bank, copy=True) for side in ("k", "v"))
                    cache.setdefault("bank", {})[number] = tuple(held)
            self._close_gap(number)

    def recall(self, blocks: Collection[int]) -> None:
        for number in self._recalled.difference(blocks):
            self._close_gap(number)
        for number in sorted(set(blocks) - self._recalled):
            for cache in self._caches:
                k, v = cache["bank"][number]
                self._write(cache, cache["end"], k, v)
                cache["end"] += k.shape[1]
            self._held[number] = k.shape[1]
        self._recalled = set(blocks)

    def recall_similar(self) -> None:
        raise ValueError(
            "retrieval by similarity needs the queries, which only a packed cache sees. Connect Apply To World Model "
            "with a method other than off, or set retrieval to camera."
        )

    def forget(self, blocks: Collection[int]) -> None:
        for cache in self._caches:
            for number in blocks:
                del cache["bank"][number]

    def _part(self, number: int) -> slice:
        """Where a block lies."""
        start = 0
        for other, tokens in self._held.items():
            if other == number:
                return slice(start, start + tokens)
            start += tokens
        raise KeyError(f"block {number} is not in reach")

    def _close_gap(self, number: int) -> None:
        part = self._part(number)
        for cache in self._caches:
            behind = slice(part.stop, cache["end"])
            self._write(cache, part.start, *(cache[side][:, behind].clone() for side in ("k", "v")))
            cache["end"] -= part.stop - part.start
        del self._held[number]

    @staticmethod
    def _write(cache: dict, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        cache["k"][:, start : start + k.shape[1]] = k
        cache["v"][:, start : start + v.shape[1]] = v


class PackedHistory:
    """Our cache: whole packed blocks leave and return."""

    def __init__(self, streams: CacheStreams, bank: torch.device | None, frame_tokens: int) -> None:
        self._streams = streams
        self._run = streams.caches[0].run
        self._bank = bank
        self._frame_tokens = frame_tokens

    def announce_clean_pass(self, frames: Sequence[int]) -> None:
        self._run.announce_clean_pass([count * self._frame_tokens for count in frames], self._frame_tokens)

    def add(self, blocks: Sequence[Block]) -> None:
        pass

    def retire(self, blocks: Collection[int]) -> None:
        for cache in self._run.caches:
            cache.retire(blocks, self._bank)

    def recall(self, blocks: Collection[int]) -> None:
        for cache in self._run.caches:
            cache.recall(blocks)

    def recall_similar(self) -> None:
        for layer in self._streams.caches:
            layer.must_choose = True

    def forget(self, blocks: Collection[int]) -> None:
        for cache in self._run.caches:
            cache.forget(blocks)

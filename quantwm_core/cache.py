"""All layers of one run: created when sampling starts, dropped when it ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from .accounting import build_record
from .backends import Dispatcher, choose, device_facts, settings_facts
from .budget import Budget
from .compiling import uncompiled
from .head_groups import HeadGroup, HeadGroups
from .layer_cache import LayerCache
from .methods import Method, build_method
from .overrides import check_overrides, head_groups
from .packing import TYPICAL_BLOCK, Packer, Reach, layers_together, pack_ready
from .settings import CacheSettings
from .span import PARTS
from .stopwatch import Stopwatch


@dataclass(frozen=True)
class CacheGeometry:
    """Shape of a model's cache."""

    layers: int
    heads: int
    head_dim: int
    batch: int = 1

    def bytes_bf16(self, tokens: int) -> int:
        """Keys and values of `tokens` tokens at two bytes a scalar."""
        return 4 * self.layers * self.heads * self.head_dim * self.batch * tokens


class WorldCache:
    """Owns the layers, the accounting and the lifetime of one sampling run.

    Args:
        value_metrics: per layer, a function giving the Gram matrix `[H, D, D]` of the output projection.
        method: overrides the one that `settings` name (ablations).
        on_block: called with a history entry after the last layer has committed a block.
        block: tokens of the largest block, or of first frames that are given: as they grow, fewer layers pack together.
        reach: how the sampler's window divides the history.
        prefilled: one forward fills it, layer by layer. Packing is then done on the caller's stream, for beside it all
            layers would wait in full precision, and the queries that come with a block count as asked before it.
    """

    def __init__(
        self,
        settings: CacheSettings,
        geometry: CacheGeometry,
        device: torch.device | None = None,
        value_metrics: Sequence[Callable[[], torch.Tensor]] | None = None,
        method: Method | None = None,
        on_block: Callable[[dict], None] | None = None,
        block: int = TYPICAL_BLOCK,
        reach: Reach | None = None,
        prefilled: bool = False,
    ) -> None:
        self.settings = settings
        self.geometry = geometry
        self._reach = reach
        self.encode_watch, self.decode_watch = Stopwatch(device), Stopwatch(device)
        check_backend(settings, geometry.head_dim, device)
        self.backend = Dispatcher(settings.backend)
        check_overrides(settings.overrides, geometry.layers, geometry.heads)
        method = method or build_method(settings)
        metrics = value_metrics or [None] * geometry.layers
        self._prefilled = prefilled
        self._together = 1
        self.layers: list[LayerCache | HeadGroups] = []
        if settings.overrides:
            self.layers += [self._mixed_layer(index, method, metric, device) for index, metric in enumerate(metrics)]
        else:
            self._together = layers_together(geometry.layers, geometry.bytes_bf16(1) // geometry.layers, block)
            for first in range(0, geometry.layers, self._together):
                self.layers += self._group(method, metrics[first : first + self._together], device)
        if settings.cache_device == "cpu" and device is not None and device.type == "cuda":
            stream = torch.cuda.Stream(device)
            for layer, following in zip(self.layers, self.layers[1:] + self.layers[:1]):
                layer.fetch_ahead(following, device, stream)
        self._budget = self._open_budget() if settings.budget_gb else None
        self.history: list[dict] = []
        self._on_block = on_block
        self._started = time.perf_counter()

    def _group(
        self, method: Method, metrics: Sequence[Callable[[], torch.Tensor] | None], device: torch.device | None
    ) -> list[LayerCache]:
        """Layers that pack together, one for each metric."""
        # A large layer that packs alone is enough work for a GPU, and blocks of many such layers would wait in full
        # precision beside a caller that runs ahead. With a cache on the CPU the caller waits for a copy in any case.
        together = self._together > 1 and not self._prefilled
        beside = device if together and self.settings.cache_device == "gpu" else None
        packer = Packer(self.settings, method, metrics, self.backend, self.encode_watch, beside, self._prefilled)
        rest = device, self.decode_watch, self.backend, packer, self._reach
        return [LayerCache(self.settings, method, None, *rest) for _ in metrics]

    def _mixed_layer(
        self, index: int, method: Method, metric: Callable[[], torch.Tensor] | None, device: torch.device | None
    ) -> LayerCache | HeadGroups:
        """One layer alone, in the bits that the settings' overrides give to it or to some of its heads."""
        s = self.settings
        groups = []
        for bits, heads in head_groups(s.overrides, (s.key_bits, s.value_bits), index, self.geometry.heads).items():
            own = replace(s, key_bits=bits[0], value_bits=bits[1], bit_overrides="")
            part = None if metric is None else partial(_metric_of, metric, heads)
            own_method = replace(method, settings=own)
            packer = Packer(own, own_method, [part], self.backend, self.encode_watch, prefilled=self._prefilled)
            rest = device, self.decode_watch, self.backend, packer, self._reach
            groups.append(HeadGroup(heads, LayerCache(own, own_method, None, *rest)))
        return groups[0].cache if len(groups) == 1 else HeadGroups(groups)

    @uncompiled
    def commit(self, layer: int) -> None:
        """Commit one layer's appended tokens, in the order of the layers.

        The last one of a group packs them all, and the last one of all completes the block.
        """
        if self._together == 1:
            self.layers[layer].commit()
        else:
            self.layers[layer].make_history()
            first = layer - layer % self._together
            if layer + 1 == min(first + self._together, self.geometry.layers):
                pack_ready(self.layers[first : layer + 1])
        if layer == self.geometry.layers - 1:
            if self._budget is not None:
                self._budget.keep()
            self._block_done()

    def retire(self, blocks: Collection[int], bank: torch.device | None = None) -> None:
        """Take blocks out of reach in all layers; see `LayerCache.retire`."""
        for layer in self.layers:
            layer.retire(blocks, bank)

    def recall(self, blocks: Collection[int]) -> None:
        """Bring blocks back from the bank in all layers; see `LayerCache.recall`."""
        for layer in self.layers:
            layer.recall(blocks)

    def forget(self, blocks: Collection[int]) -> None:
        """Drop blocks from the bank in all layers."""
        for layer in self.layers:
            layer.forget(blocks)

    def release(self) -> None:
        """Let go of what refers to itself, so that memory is free as soon as nobody holds the cache."""
        for layer in self.layers:
            layer.release()

    def usage(self) -> Counter[str]:
        """Resident bytes by part over all layers."""
        total: Counter[str] = Counter()
        rotations: set[int] = set()
        for layer in self.layers:
            total.update(layer.usage(rotations))
        return total

    def record(self) -> dict:
        """Everything measured so far, JSON-ready; see `accounting.build_record`."""
        return build_record([self])

    def resident_bytes(self) -> int:
        """Everything that this cache holds, except for what only the bank refers to."""
        return sum(self.usage().values()) - sum(layer.bank_bytes() for layer in self.layers)

    def _open_budget(self) -> Budget:
        step = self._together
        groups = [self.layers[first : first + step] for first in range(0, len(self.layers), step)]
        # A bit of keys or of values, for one token in all layers.
        per_bit = self.geometry.bytes_bf16(1) / 32
        return Budget(groups, per_bit, self.resident_bytes)

    def _block_done(self) -> None:
        record_usage = self.usage()
        raw = record_usage["raw"] + record_usage["blocks"]
        tokens = self.layers[-1].tokens
        backend, backend_reason = self.backend.summary()
        entry = {
            "block": self.layers[-1].blocks - 1,
            "tokens": tokens,
            "bytes_bf16": self.geometry.bytes_bf16(tokens),
            "bytes_packed": sum(record_usage.values()) - raw - record_usage["state"],
            "bytes_unpacked": raw + record_usage["state"],
            "bytes_bank": sum(layer.bank_bytes() for layer in self.layers),
            "bytes_by_part": {part: record_usage[part] for part in PARTS},
            "encode_seconds": round(self.encode_watch.finished_seconds(), 4),
            "decode_seconds": round(self.decode_watch.finished_seconds(), 4),
            "seconds": round(time.perf_counter() - self._started, 3),
            "backend": backend,
            "backend_reason": backend_reason,
        }
        self.history.append(entry)
        if self._on_block is not None:
            self._on_block(entry)


def _metric_of(metric: Callable[[], torch.Tensor], heads: list[int]) -> torch.Tensor:
    return metric()[heads]


def check_backend(settings: CacheSettings, head_dim: int, device: torch.device | None) -> None:
    """A backend that was asked for by name must at least be able to read the cache.

    Raises:
        NoCapableBackend: with the reasons.
    """
    if settings.compresses:
        facts = settings_facts(settings) | {"head_dim": head_dim} | (device_facts(device) if device else {})
        choose("decode_layer", settings.backend, facts, required=True)


__all__ = ["CacheGeometry", "LayerCache", "WorldCache", "check_backend"]

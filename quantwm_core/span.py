"""A packed piece of one layer's cache: some tokens' keys and values as a method stored them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

# Where each stored tensor is counted. `raw` keys or values (16 bits) are not packed at all.
PARTS = ("codes", "ids", "centroids", "scales", "zeros", "psac_c", "psac_u")
RAW = "raw"

# Tensors with a token axis, `[B, H, S, ...]` or, where raw, `[B, S, H, D]`; all others belong to the whole span,
# `[B, H, ...]`.
PER_TOKEN = {
    "k_codes",
    "v_codes",
    "k_ids",
    "v_ids",
    "k_scales",
    "v_scales",
    "zeros",
    "k_psac_c",
    "k_psac_c_scales",
    "k_raw",
    "v_raw",
}


def part_of(name: str) -> str:
    """The part (of `PARTS`, or `raw`) that a stored tensor is billed to."""
    for part in ("psac_c", "psac_u", "centroids", "codes", "ids", "scales", "zeros", RAW):
        if part in name:
            return part
    raise KeyError(f"stored tensor {name!r} belongs to no part of {PARTS}")


def _token_axis(name: str) -> int:
    return 1 if part_of(name) == RAW else 2


def _token_index(name: str, tokens: slice) -> tuple[slice, ...]:
    return (*[slice(None)] * _token_axis(name), tokens)


@dataclass(eq=False)
class PackedSpan:
    """Tensors `[B, H, S, ...]` (per token) or `[B, H, ...]` (per span) plus the plain numbers needed to read them.

    Tensors may be shared between spans (a codebook or basis learned once); accounting counts each storage once.
    """

    method: str
    tokens: int
    heads: int
    head_dim: int
    key_bits: int
    value_bits: int
    group_size: int
    rank: int
    dtype: torch.dtype
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    def batch_slice(self, index: slice) -> PackedSpan:
        """The same tokens of some batch entries; shares storage."""
        return replace(self, tensors={name: t[index] for name, t in self.tensors.items()})

    def to(self, device: torch.device) -> PackedSpan:
        """The same span on `device`."""
        return replace(self, tensors={name: t.to(device, non_blocking=True) for name, t in self.tensors.items()})

    def narrow(self, tokens: int) -> PackedSpan:
        """The first `tokens` tokens, in storage of their own, so that the rest is really freed."""
        kept = slice(tokens)
        cut = {n: t[_token_index(n, kept)].clone() if n in PER_TOKEN else t for n, t in self.tensors.items()}
        return replace(self, tokens=tokens, tensors=cut)

    def without(self, start: int, stop: int) -> PackedSpan:
        """All tokens but those from `start` to `stop`, in storage of their own."""
        cut = {
            n: torch.cat((t[_token_index(n, slice(start))], t[_token_index(n, slice(stop, None))]), _token_axis(n))
            if n in PER_TOKEN
            else t
            for n, t in self.tensors.items()
        }
        return replace(self, tokens=self.tokens - (stop - start), tensors=cut)

    def to_savable(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Contiguous tensors and string metadata, ready for `safetensors.torch.save_file`."""
        numbers = ("method", "tokens", "heads", "head_dim", "key_bits", "value_bits", "group_size", "rank")
        metadata = {name: str(getattr(self, name)) for name in numbers}
        metadata["dtype"] = str(self.dtype).removeprefix("torch.")
        return {n: t.contiguous().clone() for n, t in self.tensors.items()}, metadata

    @classmethod
    def from_saved(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> PackedSpan:
        """Inverse of `to_savable`."""
        plain = dict(metadata)
        method, dtype = plain.pop("method"), getattr(torch, plain.pop("dtype"))
        return cls(method=method, dtype=dtype, tensors=dict(tensors), **{n: int(v) for n, v in plain.items()})


@dataclass(eq=False)
class RawBlock:
    """A block in full precision: `[B, S, H, D]` keys and values, and its queries' second moment if a method asks."""

    k: torch.Tensor
    v: torch.Tensor
    moment: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.k.shape[1]

    def narrow(self, tokens: int) -> RawBlock:
        return RawBlock(self.k[:, :tokens].clone(), self.v[:, :tokens].clone(), self.moment)

    def without(self, start: int, stop: int) -> RawBlock:
        """All tokens but those from `start` to `stop`, in storage of their own."""
        k, v = (torch.cat((t[:, :start], t[:, stop:]), dim=1) for t in (self.k, self.v))
        return RawBlock(k, v, self.moment)


def storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int] | None = None) -> int:
    """Bytes of the real storages behind `tensors`, each counted once; `seen` carries storages counted before."""
    seen = set() if seen is None else seen
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def by_heads(x: torch.Tensor) -> torch.Tensor:
    """`[B, S, H, D]` -> float `[B*H, S, D]`, the layout in which codecs work."""
    return x.transpose(1, 2).flatten(0, 1).float()


def from_heads(x: torch.Tensor, batch: int, dtype: torch.dtype) -> torch.Tensor:
    """`[B*H, S, D]` -> `[B, S, H, D]` in `dtype`."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2).to(dtype)

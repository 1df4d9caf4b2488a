"""A packed piece of one layer's cache: some tokens' keys and values as a method stored them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from .codec.bits import pack_bits, unpack_bits
from .rotation import Rotation

# Where each stored tensor is counted. `raw` keys or values (16 bits) are not packed at all.
PARTS = ("codes", "ids", "centroids", "scales", "zeros", "psac_c", "psac_u")
RAW = "raw"
# Angles that a saved span brings along, `[S, D/2]`; in a run all layers share them and no span is billed for them.
ROTATION_TABLES = ("rotation_cos", "rotation_sin")
ROTATION = "rotation"

# Tensors with a token axis, `[B, H, S, ...]` (raw ones `[B, S, H, D]`); all others belong to the whole span.
PER_TOKEN = {
    "k_codes",
    "v_codes",
    "k_ids",
    "v_ids",
    "k_scales",
    "v_scales",
    "v_zeros",
    "zeros",
    "k_psac_c",
    "k_psac_c_scales",
}
# Keys or values that were not packed, `[B, S, H, D]`.
RAW_SIDES = {"k_raw", "v_raw"}
# Tensors with an axis of token groups, `[B, H, ceil(S / group_size), ...]`.
PER_TOKEN_GROUP = {"k_group_scales", "k_group_zeros"}


def part_of(name: str) -> str:
    """The part (of `PARTS`, `raw` or `rotation`) that a stored tensor is billed to."""
    for part in ("psac_c", "psac_u", "centroids", "codes", "ids", "scales", "zeros", RAW, ROTATION):
        if part in name:
            return part
    raise KeyError(f"stored tensor {name!r} belongs to no part of {PARTS}")


@dataclass(eq=False)
class PackedSpan:
    """Tensors `[B, H, S, ...]` (per token) or `[B, H, ...]` (per span) plus the plain numbers needed to read them.

    Tensors may be shared between spans (a codebook or basis learned once); accounting counts each storage once.
    phase: where in its group of tokens the first token lies, once the tokens before it have been cut off.
    rotation: keys were stored before this RoPE, which decoding applies; shared by all layers, and never moved.
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
    phase: int = 0
    # Spans of other layers that lie in the same storages, this one included; each is billed its part.
    shares: int = 1
    rotation: Rotation | None = None

    @property
    def batch(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    @cached_property
    def format(self) -> tuple:
        """What a reader has to know of it: method, bits of keys and values, group size, rank, keys before RoPE."""
        turned = self.rotation is not None
        return self.method, self.key_bits, self.value_bits, self.group_size, self.rank, turned

    def by_head(self) -> dict[str, torch.Tensor]:
        """Tensors `[B * H, ...]`, as codecs take them; what was not packed stays `[B, S, H, D]`."""
        return {name: t if name in RAW_SIDES else t.flatten(0, 1) for name, t in self.tensors.items()}

    def batch_slice(self, index: slice) -> PackedSpan:
        """The same tokens of some batch entries; shares storage."""
        return replace(self, tensors={name: t[index] for name, t in self.tensors.items()})

    def to(self, device: torch.device) -> PackedSpan:
        """The same span on `device`."""
        rotation = None if self.rotation is None else self.rotation.to(device)
        tensors = {name: t.to(device, non_blocking=True) for name, t in self.tensors.items()}
        return replace(self, tensors=tensors, rotation=rotation)

    def turned(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys `[B, S, H, D]` as attention reads them: after RoPE, if this span stores them before it."""
        return keys if self.rotation is None else self.rotation.apply(keys)

    def turned_by_heads(self, keys: torch.Tensor) -> torch.Tensor:
        """The same for float keys `[N, S, D]`, before they are rounded to `dtype`."""
        return keys if self.rotation is None else self.rotation.apply_by_heads(keys)

    def narrow(self, tokens: int) -> PackedSpan:
        """The first `tokens` tokens, in storage of their own, so that the rest is really freed."""
        return self._cut(slice(tokens), slice(-(-(self.phase + tokens) // self.group_size)), self.phase)

    def tail(self, start: int) -> PackedSpan:
        """All tokens from `start` on, in storage of their own."""
        group, phase = divmod(self.phase + start, self.group_size)
        return self._cut(slice(start, None), slice(group, None), phase)

    def _cut(self, tokens: slice, groups: slice, phase: int) -> PackedSpan:
        def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if name in PER_TOKEN:
                return tensor[:, :, tokens].clone()
            if name in PER_TOKEN_GROUP:
                return tensor[:, :, groups].clone()
            if name in RAW_SIDES:
                return tensor[:, tokens].clone()
            return tensor if self.shares == 1 else tensor.clone()

        tensors = {name: cut(name, tensor) for name, tensor in self.tensors.items()}
        if "k_psac_c_bitmap" in tensors:
            tensors |= self._cut_sparse(tokens)
        left = len(range(self.tokens)[tokens])
        rotation = None if self.rotation is None else self.rotation.cut(tokens)
        return replace(self, tokens=left, tensors=tensors, phase=phase, shares=1, rotation=rotation)

    def _cut_sparse(self, tokens: slice) -> dict[str, torch.Tensor]:
        """Coefficients that only some tokens have: the bitmap of tokens that stay, and their rows from the first on."""
        kept = unpack_bits(self.tensors["k_psac_c_bitmap"], 1, self.tokens)
        dropped = kept[..., : range(self.tokens)[tokens].start].sum(-1, dtype=torch.int64)
        cut = {"k_psac_c_bitmap": pack_bits(kept[..., tokens].contiguous(), 1)}
        for name in ("k_psac_c_rows", "k_psac_c_row_scales"):
            rows = self.tensors[name]
            place = torch.arange(rows.shape[2], device=rows.device) + dropped.unsqueeze(-1)
            place = place.clamp_max(rows.shape[2] - 1)
            shape = (*place.shape, *[1] * (rows.ndim - 3))
            cut[name] = rows.gather(2, place.view(shape).expand(*place.shape, *rows.shape[3:]))
        return cut

    def to_savable(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Contiguous tensors and string metadata, ready for `safetensors.torch.save_file`."""
        numbers = ("method", "tokens", "heads", "head_dim", "key_bits", "value_bits", "group_size", "rank", "phase")
        metadata = {name: str(getattr(self, name)) for name in numbers}
        metadata["dtype"] = str(self.dtype).removeprefix("torch.")
        tables = {} if self.rotation is None else dict(zip(ROTATION_TABLES, self.rotation.tensors))
        return {n: t.contiguous().clone() for n, t in (self.tensors | tables).items()}, metadata

    @classmethod
    def from_saved(cls, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> PackedSpan:
        """Inverse of `to_savable`."""
        plain = dict(metadata)
        method, dtype = plain.pop("method"), getattr(torch, plain.pop("dtype"))
        own = {name: t for name, t in tensors.items() if name not in ROTATION_TABLES}
        rotation = Rotation(*(tensors[n] for n in ROTATION_TABLES)) if ROTATION_TABLES[0] in tensors else None
        return cls(method=method, dtype=dtype, tensors=own, rotation=rotation, **{n: int(v) for n, v in plain.items()})


@dataclass(eq=False)
class RawBlock:
    """A block in full precision: `[B, S, H, D]` keys and values, and its queries' second moment if a method asks.

    rotation: keys are those before this RoPE; queries, and their moment, are after it.
    """

    k: torch.Tensor
    v: torch.Tensor
    moment: torch.Tensor | None = None
    rotation: Rotation | None = None

    @property
    def tokens(self) -> int:
        return self.k.shape[1]

    @property
    def turned_k(self) -> torch.Tensor:
        """Keys as attention reads them, after RoPE."""
        return self.k if self.rotation is None else self.rotation.apply(self.k)

    def narrow(self, tokens: int) -> RawBlock:
        return self.cut(slice(tokens)).owning_storage()

    def tail(self, start: int) -> RawBlock:
        return self.cut(slice(start, None)).owning_storage()

    def cut(self, tokens: slice) -> RawBlock:
        """Some tokens; shares storage."""
        rotation = None if self.rotation is None else self.rotation.cut(tokens)
        return RawBlock(self.k[:, tokens], self.v[:, tokens], self.moment, rotation)

    def owning_storage(self) -> RawBlock:
        """The same in storage of its own; the rotation belongs to all layers and stays."""
        return replace(self, k=self.k.clone(), v=self.v.clone())


def shares_of(piece: RawBlock | PackedSpan) -> int:
    """Among how many layers the storages of a piece are shared."""
    return piece.shares if isinstance(piece, PackedSpan) else 1


def storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int] | None = None, shares: int = 1) -> int:
    """Bytes of the real storages behind `tensors`, each counted once; `seen` carries storages counted before.

    shares: of a storage that is larger than its tensor, only one part in so many is counted here.
    """
    seen = set() if seen is None else seen
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes() // (shares if storage.nbytes() > tensor.nbytes else 1)
    return total


def by_heads(x: torch.Tensor) -> torch.Tensor:
    """`[B, S, H, D]` -> float `[B*H, S, D]`, the layout in which codecs work."""
    return x.transpose(1, 2).flatten(0, 1).float()


def from_heads(x: torch.Tensor, batch: int, dtype: torch.dtype) -> torch.Tensor:
    """`[B*H, S, D]` -> `[B, S, H, D]` in `dtype`."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2).to(dtype)

"""RoPE of keys that are stored before it: some models turn all keys anew at every read, so positions come late.

Channels turn in pairs (2i, 2i + 1), each token by its own angles: (a, b) -> (a cos - b sin, a sin + b cos).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .settings import CacheSettings

# Methods whose rounding steps are the same for both channels of a pair, whatever the angle.
PAIRWISE_STEPS = ("quantwm", "quantwm-paper", "rtn", "qvg", "qvg-pro")


@dataclass(frozen=True, eq=False)
class Rotation:
    """Angles of the tokens of one piece, float32 `[S, D/2]` each; all layers share them.

    Raises:
        ValueError: when the two differ in shape or are no float32 tables.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __post_init__(self) -> None:
        shapes = tuple(self.cos.shape), tuple(self.sin.shape)
        if shapes[0] != shapes[1] or self.cos.ndim != 2 or {self.cos.dtype, self.sin.dtype} != {torch.float32}:
            raise ValueError(
                f"cos and sin of a rotation are float32 [tokens, head width / 2]; got {shapes[0]} {self.cos.dtype} and "
                f"{shapes[1]} {self.sin.dtype}. Give one row a token, one angle a pair of channels."
            )

    @property
    def tokens(self) -> int:
        return self.cos.shape[0]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos, self.sin

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Keys `[B, S, H, D]` after RoPE, in their own dtype."""
        return _turn(x, self.cos.unsqueeze(1), self.sin.unsqueeze(1))

    def undo(self, x: torch.Tensor) -> torch.Tensor:
        """Keys `[B, S, H, D]` before RoPE from those after it."""
        return _turn(x, self.cos.unsqueeze(1), -self.sin.unsqueeze(1))

    def apply_by_heads(self, x: torch.Tensor) -> torch.Tensor:
        """The same for keys, or their errors, `[N, S, D]`."""
        return _turn(x, self.cos, self.sin)

    def seen(self, metric: torch.Tensor) -> torch.Tensor:
        """What a metric of keys after RoPE, such as the queries' second moment, is for keys before it: `[N, D, D]`.

        The cost e^T M e of an error e after RoPE is e^T R_n^T M R_n e before it, with R_n the turn of token n; this is
        the mean of R_n^T M R_n over the tokens. Where a pair of channels turns all the way round within the piece, its
        two diagonal entries become equal; where it hardly turns, they stay apart.

        A block of M between pairs i and j acts on v = a + ib as alpha v + beta conj(v); turning multiplies alpha by
        conj(z_i) z_j and beta by conj(z_i z_j), with z = cos + i sin, and only these products are averaged.
        """
        cos, sin = self.cos.to(metric), self.sin.to(metric)
        even, odd, mixed = (x.T @ y / self.tokens for x, y in ((cos, cos), (sin, sin), (cos, sin)))
        pairs = metric.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))
        (aa, ab), (ba, bb) = (row.unbind(-1) for row in pairs.unbind(-3))
        alpha = _product(aa + bb, ba - ab, even + odd, mixed - mixed.T)
        beta = _product(aa - bb, ba + ab, even - odd, -mixed - mixed.T)
        top = torch.stack((alpha[0] + beta[0], beta[1] - alpha[1]), dim=-1)
        bottom = torch.stack((alpha[1] + beta[1], alpha[0] - beta[0]), dim=-1)
        return torch.stack((top, bottom), dim=-3).flatten(-4, -3).flatten(-2) / 2

    def cut(self, tokens: slice) -> Rotation:
        """Some tokens' angles; shares storage with the other layers, so nothing is copied."""
        return Rotation(self.cos[tokens], self.sin[tokens])

    def narrow(self, tokens: int) -> Rotation:
        """The first `tokens` tokens."""
        return self.cut(slice(tokens))

    def tail(self, start: int) -> Rotation:
        """All tokens from `start` on."""
        return self.cut(slice(start, None))

    def to(self, device: torch.device) -> Rotation:
        """The same on `device`; itself where it is there already."""
        if self.cos.device == device:
            return self
        return Rotation(self.cos.to(device, non_blocking=True), self.sin.to(device, non_blocking=True))


# By the first of the joined rotations, for all layers that join the same ones.
_joined: weakref.WeakKeyDictionary[Rotation, tuple[tuple[weakref.ref, ...], Rotation]] = weakref.WeakKeyDictionary()


def joined_rotation(parts: Sequence[Rotation | None]) -> Rotation | None:
    """One rotation for blocks that are packed together; layers that join the same ones get the same one.

    Raises:
        ValueError: when only some of them have one.
    """
    if all(part is None for part in parts):
        return None
    if any(part is None for part in parts):
        raise ValueError(
            "blocks that are packed into one span hold keys either all before RoPE or all after it; got both. "
            "Give every block of a layer its rotation, or none."
        )
    if len(parts) == 1:
        return parts[0]
    if _adjacent([part.cos for part in parts]) and _adjacent([part.sin for part in parts]):
        rows = sum(part.tokens for part in parts)
        return Rotation(*(t.as_strided((rows, t.shape[1]), t.stride()) for t in parts[0].tensors))
    known = _joined.get(parts[0])
    if known is None or [ref() for ref in known[0]] != list(parts):
        whole = Rotation(*(torch.cat(tables) for tables in zip(*(part.tensors for part in parts))))
        known = _joined[parts[0]] = tuple(map(weakref.ref, parts)), whole
    return known[1]


def _adjacent(tables: Sequence[torch.Tensor]) -> bool:
    """Whether tables follow one another in one storage, as those of blocks that were appended together do."""
    following = zip(tables, tables[1:])
    return all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.is_contiguous()
        and b.is_contiguous()
        and a.storage_offset() + a.numel() == b.storage_offset()
        for a, b in following
    )


def check_rotation(settings: CacheSettings) -> None:
    """Refuse settings that cannot work on keys stored before RoPE; for adapters, before anything runs.

    Raises:
        ValueError: for a correction of attention that would need every key's own angles.
    """
    if settings.jensen == "off":
        return
    if settings.jensen == "exact":
        raise ValueError(
            "this model stores keys before RoPE, where attention can be corrected to second order only; got jensen "
            "'exact'. Set it to second-order or off."
        )
    if settings.method not in PAIRWISE_STEPS:
        raise ValueError(
            "this model stores keys before RoPE, where attention can be corrected for methods that round both "
            f"channels of a pair alike ({', '.join(PAIRWISE_STEPS)}); got "
            f"method {settings.method!r}. Set jensen to off."
        )


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)


def _product(real: torch.Tensor, imaginary: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple:
    """(real + i imaginary) (cos + i sin)."""
    return real * cos - imaginary * sin, real * sin + imaginary * cos

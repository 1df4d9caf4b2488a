"""`qvg` and `qvg-pro`: Quant VideoGen (arXiv 2602.02958).

K-means centroids are subtracted, once or in four stages that each cluster what the one before left; the residual is
rounded symmetrically, in 2 bits to three values, with an FP8 scale a group. Neither queries nor history matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..codec.bits import pack_bits, unpack_bits
from ..codec.codebook import gather_centroids
from ..codec.kmeans import kmeans, nearest_centroid
from ..codec.symmetric import fp8_levels, symmetric_dequantize, symmetric_quantize, symmetric_scale
from ..jensen import KeySteps
from ..query_stats import QueryStats
from ..settings import CacheSettings
from ..span import PackedSpan, by_heads, from_heads
from .base import LayerState, raw_copy
from .quantwm_paper import automatic_centroids

PRO_STAGES, PRO_GROUP = 4, 16


@dataclass(frozen=True)
class QVG:
    """stages: rounds of clustering; group: channels a scale, or None for the settings' group size."""

    settings: CacheSettings
    name: str = "qvg"
    stages: int = 1
    group: int | None = None

    uses_queries = False
    uses_earlier_queries = False
    rehearses = False
    recent_tokens = 0

    def encode(self, k: torch.Tensor, v: torch.Tensor, stats: QueryStats, state: LayerState) -> PackedSpan:
        batch, tokens, heads, head_dim = k.shape
        s = self.settings
        group_size = self.group or s.group_size
        tensors = {}
        for side, x, bits in (("k", k, s.key_bits), ("v", v, s.value_bits)):
            if bits == 16:
                tensors[f"{side}_raw"] = raw_copy(x)
            else:
                tensors |= self._encode_side(side, by_heads(x), bits, group_size)
        state.tokens += tokens
        tensors = {n: t if n.endswith("_raw") else t.unflatten(0, (batch, heads)) for n, t in tensors.items()}
        form = (s.key_bits, s.value_bits, group_size, 0, k.dtype)
        return PackedSpan(self.name, tokens, heads, head_dim, *form, tensors, rotation=stats.rotation)

    def decode(self, span: PackedSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, S, H, D]` in the dtype they came in."""
        flat = span.by_head()
        keys, values = flat.get("k_raw"), flat.get("v_raw")
        if keys is None:
            decoded = span.turned_by_heads(_decode_side(flat, "k", span.key_bits, span))
            keys = from_heads(decoded, span.batch, span.dtype)
        else:
            keys = span.turned(keys)
        if values is None:
            values = from_heads(_decode_side(flat, "v", span.value_bits, span), span.batch, span.dtype)
        return keys, values

    def key_steps(self, span: PackedSpan) -> list[KeySteps]:
        scales = span.by_head()["k_scales"]
        levels = fp8_levels(scales.device).view(1, -1, 1).expand(len(scales), -1, scales.shape[-1])
        return [KeySteps(levels, scales.view(torch.uint8), span.group_size)]

    def _encode_side(self, side: str, x: torch.Tensor, bits: int, group_size: int) -> dict[str, torch.Tensor]:
        """Ids `[N, S, stages]`, centroids `[N, stages, K, D]`, scales `[N, S, G]` and codes of keys or values."""
        # Each stage counts as tokens spent: short spans divide what one stage would get.
        count = self.settings.centroids or automatic_centroids(x.shape[1] // self.stages)
        residual, books, ids = x, [], []
        for _ in range(self.stages):
            book = kmeans(residual, count).bfloat16()
            nearest = nearest_centroid(residual, book.float())
            residual = residual - gather_centroids(book.float(), nearest)
            books.append(book)
            ids.append(nearest.to(torch.uint8))
        scale = symmetric_scale(residual, bits, group_size)
        return {
            f"{side}_codes": pack_bits(symmetric_quantize(residual, scale, bits, group_size), bits),
            f"{side}_scales": scale,
            f"{side}_ids": torch.stack(ids, dim=-1),
            f"{side}_centroids": torch.stack(books, dim=1),
        }


def _decode_side(flat: dict[str, torch.Tensor], side: str, bits: int, span: PackedSpan) -> torch.Tensor:
    """Float `[N, S, D]`."""
    codes = unpack_bits(flat[f"{side}_codes"], bits, span.head_dim)
    decoded = symmetric_dequantize(codes, flat[f"{side}_scales"], bits, span.group_size)
    for book, ids in zip(flat[f"{side}_centroids"].float().unbind(1), flat[f"{side}_ids"].unbind(-1)):
        decoded = decoded + gather_centroids(book, ids)
    return decoded

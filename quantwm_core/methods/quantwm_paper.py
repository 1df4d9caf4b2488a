"""`quantwm-paper`: QuantWM as published (arXiv 2609.26425, section 3 and appendix D.1), and plain rounding (`rtn`).

K-means centroids per head and span, query-sensitive assignment, affine INT-b residuals with packed zero-points, INT8
scales under an FP16 factor, and a rank-8 correction with INT8 coefficients, all from the queries of earlier spans.
The assignment and the correction can be switched off, which gives the ablation's other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..codec.affine import SCALE_LEVELS, affine_dequantize, affine_grid, affine_quantize, decode_scales, encode_scales
from ..codec.bits import pack_bits, packed_width, unpack_bits
from ..codec.codebook import gather_centroids
from ..codec.groups import group_count
from ..codec.kmeans import kmeans, nearest_centroid
from ..codec.psac import (
    decode_coefficients_int8,
    encode_coefficients_int8,
    helpful_rows,
    leading_eigenvectors,
)
from ..codec.qsac import CANDIDATES, assign_query_sensitive, channel_weights
from ..jensen import KeySteps
from ..query_stats import QueryStats
from ..settings import MAX_CENTROIDS, CacheSettings
from ..span import PackedSpan, by_heads, from_heads
from .base import LayerState, raw_copy

PAPER_RANK = 8
# The paper's shortest spans (7,040 tokens with 256 centroids) have 27 tokens a centroid.
TOKENS_PER_CENTROID = 27


def automatic_centroids(tokens: int) -> int:
    """256 as in the paper, or the largest power of two that leaves each centroid as many tokens as there."""
    wanted = max(1, min(MAX_CENTROIDS, tokens // TOKENS_PER_CENTROID))
    return 1 << (wanted.bit_length() - 1)


@dataclass(frozen=True)
class QuantWMPaper:
    """The published method; `centroids=False`, `query_sensitive=False`, `correction=False` give its ablations.

    symmetric: residuals on a grid around zero (ternary at 2 bits) in place of the affine one, in the same layout.
    full_metric: candidates are the nearest centroids under the queries' whole second moment, not its diagonal.
    """

    settings: CacheSettings
    name: str = "quantwm-paper"
    centroids: bool = True
    query_sensitive: bool = True
    correction: bool = True
    symmetric: bool = False
    full_metric: bool = False

    rehearses = False
    recent_tokens = 0

    @property
    def uses_queries(self) -> bool:
        return self.uses_earlier_queries

    @property
    def uses_earlier_queries(self) -> bool:
        return self.settings.key_bits != 16 and (self.query_sensitive or self.correction)

    def encode(self, k: torch.Tensor, v: torch.Tensor, stats: QueryStats, state: LayerState) -> PackedSpan:
        batch, tokens, heads, head_dim = k.shape
        s = self.settings
        moment = None if stats.earlier is None else stats.earlier.flatten(0, 1)
        tensors, zeros, rank = {}, {}, 0
        if s.key_bits == 16:
            tensors["k_raw"] = raw_copy(k)
        else:
            keys = by_heads(k)
            stored, zeros["k"], decoded = self._encode_side("k", keys, s.key_bits, stats.seen(moment))
            tensors |= stored
            if self.correction and moment is not None:
                rank = min(s.rank or PAPER_RANK, head_dim)
                error = keys - decoded
                if stats.rotation is not None:
                    error = stats.rotation.apply_by_heads(error)
                tensors |= _encode_correction(error, moment, rank)
        if s.value_bits == 16:
            tensors["v_raw"] = raw_copy(v)
        else:
            stored, zeros["v"], _ = self._encode_side("v", by_heads(v), s.value_bits, None)
            tensors |= stored
        if zeros:
            tensors["zeros"] = _pack_zeros(zeros, s.key_bits, s.value_bits)
        state.tokens += tokens
        tensors = {n: t if n.endswith("_raw") else t.unflatten(0, (batch, heads)) for n, t in tensors.items()}
        form = (s.key_bits, s.value_bits, s.group_size, rank, k.dtype)
        return PackedSpan(self.name, tokens, heads, head_dim, *form, tensors, rotation=stats.rotation)

    def decode(self, span: PackedSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, S, H, D]` in the dtype they came in."""
        flat = span.by_head()
        zeros = _unpack_zeros(flat.get("zeros"), span)
        keys, values = flat.get("k_raw"), flat.get("v_raw")
        if keys is None:
            decoded = span.turned_by_heads(_decode_side(flat, "k", span.key_bits, zeros["k"], span))
            keys = from_heads(decoded + _decode_correction(flat, span), span.batch, span.dtype)
        else:
            keys = span.turned(keys)
        if values is None:
            values = from_heads(_decode_side(flat, "v", span.value_bits, zeros["v"], span), span.batch, span.dtype)
        return keys, values

    def key_steps(self, span: PackedSpan) -> list[KeySteps]:
        """Keys without a row of coefficients keep their noise in all directions, so they are listed apart."""
        flat = span.by_head()
        codes, factor = flat["k_scales"], flat["k_scales_factor"]
        steps = torch.arange(SCALE_LEVELS + 1, dtype=torch.uint8, device=codes.device).view(1, -1, 1)
        levels = decode_scales(steps, factor).expand(-1, -1, codes.shape[-1])
        if span.rank == 0:
            return [KeySteps(levels, codes, span.group_size)]
        corrected = _has_row(flat, span).unsqueeze(-1)
        return [
            KeySteps(levels, codes * corrected, span.group_size, basis=flat["k_psac_u"]),
            KeySteps(levels, codes * ~corrected, span.group_size),
        ]

    def _encode_side(
        self, prefix: str, x: torch.Tensor, bits: int, moment: torch.Tensor | None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Stored tensors, zero-points uint8 `[N, S, G]` and decoded values float `[N, S, D]` of keys or values."""
        group_size = self.settings.group_size
        tensors = {}
        base: torch.Tensor | float = 0.0
        if self.centroids:
            # Rounded to their storage type before residuals are taken.
            count = self.settings.centroids or automatic_centroids(x.shape[1])
            book = kmeans(x, count).bfloat16()
            ids = self._assign(prefix, x, book.float(), moment)
            base = gather_centroids(book.float(), ids)
            tensors = {f"{prefix}_centroids": book, f"{prefix}_ids": ids.to(torch.uint8)}
        residual = x - base
        wanted, zero = affine_grid(residual, bits, group_size, self.symmetric)
        scale_codes, factor = encode_scales(wanted)
        scale = decode_scales(scale_codes, factor)
        codes = affine_quantize(residual, scale, zero, bits, group_size)
        if self.symmetric:
            codes = codes.clamp_max((1 << bits) - 2)
        tensors |= {f"{prefix}_codes": pack_bits(codes, bits)}
        tensors |= {f"{prefix}_scales": scale_codes, f"{prefix}_scales_factor": factor}
        return tensors, zero, base + affine_dequantize(codes, scale, zero, group_size)

    def _assign(self, prefix: str, x: torch.Tensor, book: torch.Tensor, moment: torch.Tensor | None) -> torch.Tensor:
        if prefix == "v" or not self.query_sensitive:
            return nearest_centroid(x, book)
        weights = channel_weights(moment, x)
        metric = moment if self.full_metric else None
        return assign_query_sensitive(
            x, book, weights, self.settings.group_size, self.settings.candidates or CANDIDATES, metric=metric
        )


def plain_rounding(settings: CacheSettings, name: str = "rtn") -> QuantWMPaper:
    """Rounding in channel groups and nothing else, in the paper's layout."""
    return QuantWMPaper(settings, name, centroids=False, query_sensitive=False, correction=False)


def _pack_zeros(zeros: dict[str, torch.Tensor], key_bits: int, value_bits: int) -> torch.Tensor:
    """Zero-points of keys and values bit-packed side by side, so that two INT2 groups each fill one byte a token."""
    if len(zeros) == 2 and key_bits == value_bits:
        return pack_bits(torch.cat((zeros["k"], zeros["v"]), dim=-1), key_bits)
    bits = {"k": key_bits, "v": value_bits}
    return torch.cat([pack_bits(zero, bits[side]) for side, zero in zeros.items()], dim=-1)


def _unpack_zeros(packed: torch.Tensor | None, span: PackedSpan) -> dict[str, torch.Tensor]:
    """Inverse of `_pack_zeros`: uint8 `[N, S, G]` for each packed side."""
    groups = group_count(span.head_dim, span.group_size)
    bits = {side: b for side, b in (("k", span.key_bits), ("v", span.value_bits)) if b != 16}
    if len(set(bits.values())) == 1 and len(bits) == 2:
        both = unpack_bits(packed, span.key_bits, 2 * groups)
        return {"k": both[..., :groups], "v": both[..., groups:]}
    sides, start = {}, 0
    for side, b in bits.items():
        width = packed_width(groups, b)
        sides[side] = unpack_bits(packed[..., start : start + width], b, groups)
        start += width
    return sides


def _decode_side(
    flat: dict[str, torch.Tensor], prefix: str, bits: int, zero: torch.Tensor, span: PackedSpan
) -> torch.Tensor:
    scale = decode_scales(flat[f"{prefix}_scales"], flat[f"{prefix}_scales_factor"])
    codes = unpack_bits(flat[f"{prefix}_codes"], bits, span.head_dim)
    decoded = affine_dequantize(codes, scale, zero, span.group_size)
    if f"{prefix}_centroids" in flat:
        decoded = decoded + gather_centroids(flat[f"{prefix}_centroids"].float(), flat[f"{prefix}_ids"])
    return decoded


def _encode_correction(error: torch.Tensor, moment: torch.Tensor, rank: int) -> dict[str, torch.Tensor]:
    """Coefficients of `error` `[N, S, D]` along the leading query directions, dense or sparse, whichever is smaller."""
    basis = leading_eigenvectors(moment, rank).bfloat16()
    codes, scale = encode_coefficients_int8(error @ basis.float())
    kept = helpful_rows(error, decode_coefficients_int8(codes, scale), basis.float(), moment)
    tensors = {"k_psac_u": basis}
    tokens = kept.shape[1]
    most = int(kept.sum(1).max())
    row_bytes = rank + 2
    if packed_width(tokens, 1) + most * row_bytes >= tokens * row_bytes:
        tensors["k_psac_c"] = codes * kept.unsqueeze(-1)
        tensors["k_psac_c_scales"] = scale * kept
        return tensors
    # Kept rows first, in token order; a bitmap says which tokens they belong to.
    order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    tensors["k_psac_c_bitmap"] = pack_bits(kept.to(torch.uint8), 1)
    tensors["k_psac_c_rows"] = codes.gather(1, order.unsqueeze(-1).expand(-1, -1, rank)).contiguous()
    tensors["k_psac_c_row_scales"] = scale.gather(1, order).contiguous()
    return tensors


def _decode_correction(flat: dict[str, torch.Tensor], span: PackedSpan) -> torch.Tensor | float:
    if span.rank == 0:
        return 0.0
    if "k_psac_c" in flat:
        coefficients = decode_coefficients_int8(flat["k_psac_c"], flat["k_psac_c_scales"])
    else:
        coefficients = _expand_rows(flat, span)
    return coefficients @ flat["k_psac_u"].float().transpose(1, 2)


def _has_row(flat: dict[str, torch.Tensor], span: PackedSpan) -> torch.Tensor:
    """Which keys were corrected, bool `[N, S]`."""
    if "k_psac_c_scales" in flat:
        return flat["k_psac_c_scales"] > 0
    return unpack_bits(flat["k_psac_c_bitmap"], 1, span.tokens).bool()


def _expand_rows(flat: dict[str, torch.Tensor], span: PackedSpan) -> torch.Tensor:
    """Sparse rows back to one row a token, float `[N, S, R]`."""
    kept = unpack_bits(flat["k_psac_c_bitmap"], 1, span.tokens).bool()
    rows = decode_coefficients_int8(flat["k_psac_c_rows"], flat["k_psac_c_row_scales"])
    if rows.shape[1] == 0:
        return rows.new_zeros(kept.shape[0], span.tokens, span.rank)
    place = (kept.long().cumsum(1) - 1).clamp_min(0)
    spread = rows.gather(1, place.unsqueeze(-1).expand(-1, -1, span.rank))
    return spread * kept.unsqueeze(-1)

"""`quantwm`: the paper's centroids and query-subspace correction, with what we found beyond it.

Against `quantwm-paper` at the same bit width:
- statistics of the span's own queries, so the first span is corrected too (an image or video to continue *is* the
  first span), and nothing has to be remembered between spans;
- error feedback across channels under the query metric for keys and the output projection's metric for values;
- a mid-rise grid with 4-bit logarithmic scales instead of zero-points and INT8 scales;
- twice the rank with INT4 coefficients, 4-bit centroids, and bases and value codebooks shared between spans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..codec.bits import pack_bits, unpack_bits
from ..codec.codebook import Codebook, gather_centroids
from ..codec.feedback import feedback_matrix, packed_weights, quantize_with_feedback, unpacked_weights
from ..codec.groups import group_count, spread_groups
from ..codec.kmeans import ITERATIONS, WARM_ITERATIONS, evenly_spaced, kmeans, nearest_centroid, scattered_tokens
from ..codec.midrise import (
    decode_log_scales,
    encode_log_scales,
    midrise_dequantize,
    midrise_quantize,
    midrise_step,
    scale_format,
)
from ..codec.psac import decode_coefficients_int4, encode_coefficients_int4, leading_eigenvectors
from ..codec.qsac import BUCKETS, CANDIDATES, assign_query_sensitive, channel_weights
from ..jensen import KeySteps
from ..query_stats import QueryStats
from ..rotation import Rotation
from ..settings import MAX_CENTROIDS, CacheSettings
from ..span import PackedSpan, by_heads, from_heads
from .base import LayerState, raw_copy

KEY_TOKENS_PER_CENTROID = 32
VALUE_TOKENS_PER_CENTROID = 16
# Codebooks of long spans are learned from a sample. Half as many tokens cost decibels on the tiny world.
SAMPLE_PER_CENTROID = 32


def automatic_rank(head_dim: int) -> int:
    """An eighth of the head width, rounded up to whole bytes of INT4 coefficients."""
    return 2 * -(-head_dim // 16)


@dataclass
class KeySteering:
    """What the queries say about keys: directions to correct bf16 `[N, D, rank]`, error feedback bf16 `[N, D, D]`.

    rotation: keys are stored before this RoPE. The directions are those of queries, after it; the feedback is for keys
        as they are stored.
    """

    basis: torch.Tensor | None
    feedback: torch.Tensor | None
    rotation: Rotation | None = None

    def errors(self, stored: torch.Tensor) -> torch.Tensor:
        """Errors float `[N, S, D]` of stored keys as queries meet them."""
        return stored if self.rotation is None else self.rotation.apply_by_heads(stored)


@dataclass(frozen=True)
class QuantWM:
    """Our default method. `feedback` and `correction` switch parts off for ablations.

    full_metric: candidates are the nearest centroids under the queries' whole second moment, not its diagonal; an
        ablation of the PyTorch encoder alone.
    """

    settings: CacheSettings
    feedback: bool = True
    correction: bool = True
    name: str = "quantwm"
    full_metric: bool = False
    uses_earlier_queries = False
    recent_tokens = 0

    @property
    def uses_queries(self) -> bool:
        return self.settings.key_bits != 16 and (self.feedback or self.correction or self.candidates > 1)

    @property
    def candidates(self) -> int:
        """Centroids that a key may take; automatically one if its steps follow the size of the residual, not its range.

        The nearest centroid leaves the smallest residual already, as the queries see it. That is measured for the
        automatic rank: with half of it the choice among four is worth .5 dB on the tiny world.
        """
        s = self.settings
        return s.candidates or (1 if s.key_bits == 2 and not s.rank else CANDIDATES)

    @property
    def rehearses(self) -> bool:
        return self.uses_queries

    def encode(self, k: torch.Tensor, v: torch.Tensor, stats: QueryStats, state: LayerState) -> PackedSpan:
        batch, tokens, heads, head_dim = k.shape
        s = self.settings
        moment = None if stats.own is None else stats.own.flatten(0, 1)
        rank = self._rank(head_dim) if moment is not None and self.correction and s.key_bits != 16 else 0
        steering = self._steer(moment, rank, tokens, stats, state) if s.key_bits != 16 else None
        tensors = {"v_raw": raw_copy(v)} if s.value_bits == 16 else self._encode_values(v, state)
        seen = stats.seen(moment)
        tensors |= {"k_raw": raw_copy(k)} if steering is None else self._encode_keys(k, seen, steering, state)
        state.tokens += tokens
        tensors = {n: t if n.endswith("_raw") else t.unflatten(0, (batch, heads)) for n, t in tensors.items()}
        form = (s.key_bits, s.value_bits, s.group_size, rank, k.dtype)
        return PackedSpan(self.name, tokens, heads, head_dim, *form, tensors, rotation=stats.rotation)

    def decode(self, span: PackedSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, S, H, D]` in the dtype they came in."""
        flat = span.by_head()
        keys, values = flat.get("k_raw"), flat.get("v_raw")
        if keys is None:
            keys = span.turned_by_heads(_decode_residual(flat, "k", span.key_bits, span))
            keys = from_heads(keys + _decode_correction(flat, span.rank), span.batch, span.dtype)
        else:
            keys = span.turned(keys)
        if values is None:
            values = from_heads(_decode_residual(flat, "v", span.value_bits, span), span.batch, span.dtype)
        return keys, values

    def key_steps(self, span: PackedSpan) -> list[KeySteps]:
        flat = span.by_head()
        scale_bits, per_octave = scale_format(span.key_bits)
        index = unpack_bits(flat["k_scales"], scale_bits, group_count(span.head_dim, span.group_size))
        codes = torch.arange(1 << scale_bits, dtype=torch.uint8, device=index.device).view(1, -1, 1)
        levels = decode_log_scales(codes, flat["k_scales_top"], scale_bits, per_octave)
        levels = levels.expand(-1, -1, index.shape[-1])
        return [KeySteps(levels, index, span.group_size, basis=flat.get("k_psac_u"))]

    def _rank(self, head_dim: int) -> int:
        return min(self.settings.rank or automatic_rank(head_dim), head_dim)

    def centroid_count(self, tokens: int, tokens_per_centroid: int) -> int:
        return min(tokens, self.settings.centroids or max(1, min(MAX_CENTROIDS, tokens // tokens_per_centroid)))

    def _steer(
        self, moment: torch.Tensor | None, rank: int, tokens: int, stats: QueryStats, state: LayerState
    ) -> KeySteering:
        basis = key_basis(moment, rank, tokens, state, key_directions)
        wanted = moment is not None and self.feedback
        return KeySteering(basis, key_feedback(moment, basis, stats) if wanted else None, stats.rotation)

    def _encode_keys(
        self, k: torch.Tensor, moment: torch.Tensor | None, steering: KeySteering, state: LayerState
    ) -> dict[str, torch.Tensor]:
        x = by_heads(k)
        count = self.centroid_count(x.shape[1], KEY_TOKENS_PER_CENTROID)
        book = learn_codebook(x, count, earlier_codebook(state, "k", x.shape[0], count))
        state.learn("k_centroids", x.shape[1], k_centroids=book.codes, k_centroids_grid=book.grid)
        centroids = book.decode()
        weights = channel_weights(moment, x)
        s = self.settings
        metric = moment if self.full_metric else None
        ids = assign_query_sensitive(x, centroids, weights, s.group_size, self.candidates, BUCKETS, metric)
        residual = x - gather_centroids(centroids, ids)
        tensors, decoded = self._encode_residual("k", residual, ids, s.key_bits, steering.feedback)
        tensors |= {"k_centroids": book.codes, "k_centroids_grid": book.grid}
        basis = steering.basis
        if basis is not None:
            error = steering.errors(residual - decoded).bfloat16().float()
            coefficients, scales, factor = encode_coefficients_int4(error @ basis.float())
            tensors |= {"k_psac_c": coefficients, "k_psac_c_scales": scales, "k_psac_c_factor": factor}
            tensors["k_psac_u"] = basis
        return tensors

    def _encode_values(self, v: torch.Tensor, state: LayerState) -> dict[str, torch.Tensor]:
        x = by_heads(v)
        tokens = x.shape[1]
        if state.due("v_centroids"):
            count = self.centroid_count(tokens, VALUE_TOKENS_PER_CENTROID)
            book = learn_codebook(x, count, earlier_codebook(state, "v", x.shape[0], count))
            state.learn("v_centroids", tokens, v_centroids=book.codes, v_centroids_grid=book.grid)
        if self.feedback and state.value_metric is not None and "v_feedback" not in state.shared:
            state.learn("v_feedback", tokens, v_feedback=packed_weights(feedback_matrix(state.value_metric())))
        book = Codebook(state.shared["v_centroids"], state.shared["v_centroids_grid"])
        centroids = book.decode()
        ids = nearest_centroid(x, centroids)
        steering = state.shared.get("v_feedback")
        if steering is not None:
            steering = unpacked_weights(steering, x.shape[-1]).repeat(x.shape[0] // steering.shape[0], 1, 1)
        tensors, _ = self._encode_residual(
            "v", x - gather_centroids(centroids, ids), ids, self.settings.value_bits, steering
        )
        return tensors | {"v_centroids": book.codes, "v_centroids_grid": book.grid}

    def _encode_residual(
        self, prefix: str, residual: torch.Tensor, ids: torch.Tensor, bits: int, steering: torch.Tensor | None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        scale_bits, per_octave = scale_format(bits)
        group_size = self.settings.group_size
        wanted = midrise_step(residual, bits, group_size)
        scale_codes, top = encode_log_scales(wanted, scale_bits, per_octave)
        step = spread_groups(
            decode_log_scales(scale_codes, top, scale_bits, per_octave), group_size, residual.shape[-1]
        )

        def rounding(target: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
            codes = midrise_quantize(target, step[..., part], bits)
            return codes, midrise_dequantize(codes, step[..., part], bits)

        codes, decoded = quantize_with_feedback(residual, steering, rounding)
        tensors = {
            f"{prefix}_codes": pack_bits(codes, bits),
            f"{prefix}_ids": ids.to(torch.uint8),
            f"{prefix}_scales": pack_bits(scale_codes, scale_bits),
            f"{prefix}_scales_top": top,
        }
        return tensors, decoded


def learn_codebook(x: torch.Tensor, count: int, before: Codebook | None = None) -> Codebook:
    """`count` centroids of `x` float `[N, S, D]`, from a sample of its tokens; `before` is a codebook to begin with."""
    tokens = x.shape[1]
    sample = x[:, scattered_tokens(tokens, SAMPLE_PER_CENTROID * count, x.device)]
    if before is not None:
        return Codebook.encode(kmeans(sample, count, WARM_ITERATIONS, before.decode()))
    return Codebook.encode(kmeans(sample, count, ITERATIONS, x[:, evenly_spaced(tokens, count, x.device)]))


def earlier_codebook(state: LayerState, side: str, heads: int, count: int) -> Codebook | None:
    """The layer's last codebook of keys ("k") or values ("v"), if it has the size that is wanted now."""
    codes = state.shared.get(f"{side}_centroids")
    if codes is None or codes.shape[:2] != (heads, count):
        return None
    return Codebook(codes, state.shared[f"{side}_centroids_grid"])


def key_basis(
    moment: torch.Tensor | None,
    rank: int,
    tokens: int,
    state: LayerState,
    directions: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor | None:
    """Leading query directions bf16 `[N, D, rank]`, found anew by `directions` whenever the history has doubled."""
    if moment is None or rank == 0:
        return None
    if state.due("k_psac_u"):
        state.learn("k_psac_u", tokens, k_psac_u=directions(moment, rank))
    return state.shared["k_psac_u"]


def key_directions(moment: torch.Tensor, rank: int) -> torch.Tensor:
    """bf16 `[N, D, rank]`, largest eigenvalue last."""
    return leading_eigenvectors(moment, rank).bfloat16()


def key_metric(moment: torch.Tensor, basis: torch.Tensor | None, stats: QueryStats) -> torch.Tensor:
    """What an error of a stored key costs, float `[N, D, D]`: nothing in directions that the correction restores.

    Moment and basis are those of queries; `stats` say whether keys are stored before RoPE.
    """
    if basis is not None:
        basis = basis.float()
        eye = torch.eye(moment.shape[-1], device=moment.device)
        complement = eye - basis @ basis.transpose(1, 2)
        moment = complement @ moment @ complement.transpose(1, 2)
    return stats.seen(moment)


def key_feedback(moment: torch.Tensor, basis: torch.Tensor | None, stats: QueryStats) -> torch.Tensor:
    """Feedback weights for keys: errors go where they cost least."""
    return feedback_matrix(key_metric(moment, basis, stats))


def _decode_residual(flat: dict[str, torch.Tensor], prefix: str, bits: int, span: PackedSpan) -> torch.Tensor:
    """Centroid plus dequantized residual, float `[N, S, D]`."""
    scale_bits, per_octave = scale_format(bits)
    groups = -(-span.head_dim // span.group_size)
    scale_codes = unpack_bits(flat[f"{prefix}_scales"], scale_bits, groups)
    scale = decode_log_scales(scale_codes, flat[f"{prefix}_scales_top"], scale_bits, per_octave)
    step = spread_groups(scale, span.group_size, span.head_dim)
    codes = unpack_bits(flat[f"{prefix}_codes"], bits, span.head_dim)
    book = Codebook(flat[f"{prefix}_centroids"], flat[f"{prefix}_centroids_grid"])
    return gather_centroids(book.decode(), flat[f"{prefix}_ids"]) + midrise_dequantize(codes, step, bits)


def _decode_correction(flat: dict[str, torch.Tensor], rank: int) -> torch.Tensor | float:
    """C U^T, float `[N, S, D]`."""
    if rank == 0:
        return 0.0
    coefficients = decode_coefficients_int4(flat["k_psac_c"], flat["k_psac_c_scales"], flat["k_psac_c_factor"], rank)
    return coefficients @ flat["k_psac_u"].float().transpose(1, 2)

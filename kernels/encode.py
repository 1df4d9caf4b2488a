"""Packing a span for `quantwm`: the stages of the method on kernels, without a float copy of keys and values.

Workspace beside the stored span, per head and token: 4 bytes a group of steps (keys and values, one after the other),
4 bytes of candidates (8 if more than four) and 4 bytes a direction of coefficients; per head: four tables of centroids.
Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from ..quantwm_core.backends import Between, OneOf, register
from ..quantwm_core.codec.codebook import Codebook
from ..quantwm_core.codec.feedback import feedback_matrix, packed_weights, unpacked_weights
from ..quantwm_core.methods import LayerState, QuantWM
from ..quantwm_core.methods.quantwm import (
    KEY_TOKENS_PER_CENTROID,
    VALUE_TOKENS_PER_CENTROID,
    KeySteering,
    earlier_codebook,
    key_basis,
    key_directions,
    key_feedback,
    key_metric,
)
from ..quantwm_core.query_stats import QueryStats
from ..quantwm_core.span import PackedSpan, RawBlock
from .decode import FAILURES, decode_layer
from .encode_codebook import codebook_operands, learn_centroids, round_codebook
from .encode_match import match
from .encode_residual import encode_coefficients, encode_residual
from .launching import can_rehearse, in_rows, rehearsal
from .statistics import LARGEST_RANK, WIDEST, feedback_weights, leading_eigenvectors

# Each one more is another pass over a tile's distances.
MOST_CANDIDATES = 8
# Rounding and ties make the two encoders differ by a tenth of a percent on long spans, by a few on very short ones.
TOLERANCE = 1.25
# What an instance of the method consists of.
PARTS = tuple(field.name for field in fields(QuantWM))
_checked: set[tuple] = set()


class WrongResult(RuntimeError):
    """A kernel ran and gave something else than its eager twin."""


@dataclass(frozen=True)
class MultipleOf:
    """Rule: the fact is a multiple of `step`, up to `high`."""

    step: int
    high: int

    def refusal(self, name: str, value: int) -> str | None:
        fits = 0 < value <= self.high and value % self.step == 0
        return None if fits else f"{name} is {value}, not a multiple of {self.step} up to {self.high}"


@dataclass(frozen=True)
class FusedQuantWM(QuantWM):
    """`QuantWM` with its two encoders on kernels; policy, layout and decoding are the method's own."""

    def _steer(
        self, moment: torch.Tensor | None, rank: int, tokens: int, stats: QueryStats, state: LayerState
    ) -> KeySteering:
        basis = key_basis(moment, rank, tokens, state, _directions)
        wanted = moment is not None and self.feedback
        return KeySteering(basis, _key_feedback(moment, basis, stats) if wanted else None, stats.rotation)

    def _encode_keys(
        self, k: torch.Tensor, moment: torch.Tensor | None, steering: KeySteering, state: LayerState
    ) -> dict[str, torch.Tensor]:
        k, s = in_rows(k), self.settings
        tokens, count = k.shape[1], self.centroid_count(k.shape[1], KEY_TOKENS_PER_CENTROID)
        before = earlier_codebook(state, "k", k.shape[0] * k.shape[2], count)
        book, operands = round_codebook(learn_centroids(k, count, before), moment, k.dtype)
        state.learn("k_centroids", tokens, k_centroids=book.codes, k_centroids_grid=book.grid)
        matched = match(k, book, operands, s.key_bits, s.group_size, self.candidates)
        basis = steering.basis
        tensors, raw, peaks = encode_residual(
            "k", k, book, matched, s.key_bits, s.group_size, steering.feedback, basis, steering.rotation
        )
        tensors |= {"k_centroids": book.codes, "k_centroids_grid": book.grid}
        if basis is not None:
            tensors |= encode_coefficients(raw, peaks) | {"k_psac_u": basis}
        return tensors

    def _encode_values(self, v: torch.Tensor, state: LayerState) -> dict[str, torch.Tensor]:
        v, s, tokens = in_rows(v), self.settings, v.shape[1]
        if state.due("v_centroids"):
            count = self.centroid_count(tokens, VALUE_TOKENS_PER_CENTROID)
            before = earlier_codebook(state, "v", v.shape[0] * v.shape[2], count)
            book, operands = round_codebook(learn_centroids(v, count, before), None, v.dtype)
            state.learn("v_centroids", tokens, v_centroids=book.codes, v_centroids_grid=book.grid)
        else:
            book = Codebook(state.shared["v_centroids"], state.shared["v_centroids_grid"])
            operands = codebook_operands(book, None, v.dtype)
        if self.feedback and state.value_metric is not None and "v_feedback" not in state.shared:
            state.learn("v_feedback", tokens, v_feedback=packed_weights(_value_feedback(state.value_metric())))
        matched = match(v, book, operands, s.value_bits, s.group_size)
        feedback = state.shared.get("v_feedback")
        if feedback is not None:
            feedback = unpacked_weights(feedback, v.shape[-1])
        tensors, _, _ = encode_residual("v", v, book, matched, s.value_bits, s.group_size, feedback)
        return tensors | {"v_centroids": book.codes, "v_centroids_grid": book.grid}


def _directions(moment: torch.Tensor, rank: int) -> torch.Tensor:
    fits = moment.shape[-1] <= WIDEST and rank <= LARGEST_RANK
    return leading_eigenvectors(moment, rank) if fits else key_directions(moment, rank)


def _key_feedback(moment: torch.Tensor, basis: torch.Tensor | None, stats: QueryStats) -> torch.Tensor:
    if moment.shape[-1] > WIDEST:
        return key_feedback(moment, basis, stats)
    if stats.rotation is None:
        return feedback_weights(moment, basis)
    return feedback_weights(key_metric(moment, basis, stats))


def _value_feedback(metric: torch.Tensor) -> torch.Tensor:
    return feedback_weights(metric.float()) if metric.shape[-1] <= WIDEST else feedback_matrix(metric)


@register(
    "encode_span",
    "triton",
    constraints={
        "device": OneOf(("cuda",)),
        "capability": Between((8, 0)),
        "dtype": OneOf((torch.bfloat16, torch.float16)),
        "method": OneOf(("quantwm",)),
        "head_dim": MultipleOf(16, 256),
        "candidates": Between(0, MOST_CANDIDATES),
    },
    failures=FAILURES,
)
def encode_span(method: QuantWM, k: torch.Tensor, v: torch.Tensor, stats: QueryStats, state: LayerState) -> PackedSpan:
    """Pack keys and values `[B, S, H, D]` as `method.encode` does; the first span of a kind is checked against it."""
    # By heads the moment must lie in rows; it does, unless the caller cut it from another tensor.
    if stats.own is not None:
        stats = QueryStats(stats.own.contiguous(), rotation=stats.rotation)
    on_kernels = fused(method)
    kind = (k.device, k.dtype, k.shape[2:], method.settings, stats.rotation is None)
    if kind not in _checked:
        if can_rehearse():
            _rehearse(on_kernels, k, v, stats)
        _check(on_kernels, method, k[:1], v[:1], stats, state)
        _checked.add(kind)
    return on_kernels.encode(k, v, stats, state)


def _rehearse(method: FusedQuantWM, k: torch.Tensor, v: torch.Tensor, stats: QueryStats) -> None:
    """Have the kernels compiled that this span, the next ones of its kind, and decoding them take.

    Nothing is computed: results are memory as it was found.
    """
    n, width = k.shape[0] * k.shape[2], k.shape[3]
    metric = torch.zeros(n, width, width, device=k.device)
    with rehearsal():
        # Alone, as it will be checked, and together.
        for part in (slice(1), slice(None)):
            own = QueryStats(None if stats.own is None else stats.own[part], rotation=stats.rotation)
            state = LayerState(lambda: metric)
            # Spans that learn a codebook, that begin with an earlier one, and that use it as it is.
            for _ in range(3):
                span = method.encode(k[part], v[part], own, state)
        live = RawBlock(k[:1, :1], v[:1, :1])
        decode_layer(method, [span.batch_slice(slice(1)), live], *k.new_empty(2, 1, k.shape[1] + 1, *k.shape[2:]))


def fused(method: QuantWM) -> FusedQuantWM:
    """The same method with its encoders on kernels."""
    return FusedQuantWM(**{name: getattr(method, name) for name in PARTS})


def _check(
    on_kernels: QuantWM, method: QuantWM, k: torch.Tensor, v: torch.Tensor, stats: QueryStats, state: LayerState
):
    """Encode one entry of a batch both ways, as if it were the first, and compare what the queries will miss.

    Compilers have got products wrong before, and a wrong cache shows as a spoilt picture, not as an error.

    Raises:
        WrongResult: when the kernels lose clearly more than plain PyTorch does.
    """
    stats = QueryStats(None if stats.own is None else stats.own[:1], rotation=stats.rotation)
    metric = None if state.value_metric is None else state.value_metric()[: k.shape[2]]
    losses = []
    for encoder in (on_kernels, method):
        fresh = LayerState(None if metric is None else lambda: metric)
        span = encoder.encode(k, v, stats, fresh)
        losses.append(_losses(method.decode(span), k, v, stats))
    if not all(lost <= TOLERANCE * expected + 1e-30 for lost, expected in zip(*losses)):
        raise WrongResult(f"keys and values lose {losses[0]} where {losses[1]} is expected on this GPU and Triton")


def _losses(decoded: tuple[torch.Tensor, torch.Tensor], k: torch.Tensor, v: torch.Tensor, stats: QueryStats):
    """Error of keys under the queries' second moment (plain without one) and of values."""
    expected = k.float() if stats.rotation is None else stats.rotation.apply(k.float())
    error = (decoded[0].float() - expected).transpose(1, 2)
    seen = error if stats.own is None else error @ stats.own
    return float((error * seen).sum()), float((decoded[1].float() - v.float()).square().sum())

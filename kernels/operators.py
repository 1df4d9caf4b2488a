"""Encoding as operators of torch, which torch.compile puts into its graph without looking into them.

For callers that compile `encode_span` itself: a `LayerCache` packs between graphs. They are used only while something
is being compiled, because calling one takes longer than most kernels. What a method remembers changes outside of them,
so that an operator is a function of its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..quantwm_core.codec.bits import packed_width
from ..quantwm_core.codec.feedback import feedback_matrix, packed_weights
from ..quantwm_core.codec.groups import group_count
from ..quantwm_core.codec.midrise import scale_format
from ..quantwm_core.methods import LayerState, QuantWM
from ..quantwm_core.methods.quantwm import (
    KEY_TOKENS_PER_CENTROID,
    VALUE_TOKENS_PER_CENTROID,
    KeySteering,
    earlier_codebook,
    key_basis,
    key_directions,
    key_metric,
)
from ..quantwm_core.query_stats import QueryStats
from ..quantwm_core.rotation import Rotation
from ..quantwm_core.settings import CacheSettings
from . import encode, statistics

# Settings that decide what an operator does, in the order in which it takes them.
NUMBERS = ("key_bits", "value_bits", "group_size", "centroids", "candidates")
BOOK = ("centroids", "centroids_grid")
STORED = ("codes", "ids", "scales", "scales_top")
CORRECTION = ("k_psac_c", "k_psac_c_scales", "k_psac_c_factor")


@torch.library.custom_op("quantwm::leading_eigenvectors", mutates_args=(), schema="(Tensor moment, int rank) -> Tensor")
def leading_eigenvectors(moment, rank):
    """`statistics.leading_eigenvectors`."""
    return statistics.leading_eigenvectors(moment, rank)


@leading_eigenvectors.register_fake
def _(moment, rank):
    return moment.new_empty(*moment.shape[:2], rank, dtype=torch.bfloat16)


@torch.library.custom_op(
    "quantwm::feedback_weights", mutates_args=(), schema="(Tensor metric, Tensor? basis) -> Tensor"
)
def feedback_weights(metric, basis=None):
    """`statistics.feedback_weights`."""
    return statistics.feedback_weights(metric, basis)


@feedback_weights.register_fake
def _(metric, basis=None):
    return metric.new_empty(metric.shape, dtype=torch.bfloat16)


@torch.library.custom_op(
    "quantwm::encode_keys",
    mutates_args=(),
    schema="(Tensor k, Tensor? moment, Tensor? feedback, Tensor? basis, Tensor? cos, Tensor? sin, Tensor? book, "
    "Tensor? grid, int[] numbers) -> Tensor[]",
)
def encode_keys(k, moment, feedback, basis, cos, sin, book, grid, numbers):
    """Codebook and stored tensors of keys `[B, S, H, D]`, and coefficients of the correction if there is a basis."""
    state = _state("k", book, grid)
    steering = KeySteering(basis, feedback, None if cos is None else Rotation(cos, sin))
    tensors = _method(numbers)._encode_keys(k, moment, steering, state)
    return [tensors[name] for name in _names("k", True, basis is not None)]


@encode_keys.register_fake
def _(k, moment, feedback, basis, cos, sin, book, grid, numbers):
    method = _method(numbers)
    count = method.centroid_count(k.shape[1], KEY_TOKENS_PER_CENTROID)
    tensors = _empty_book(k, count) + _empty_side(k, method.settings.key_bits, method.settings.group_size)
    return tensors if basis is None else tensors + _empty_correction(k, basis.shape[-1])


@torch.library.custom_op(
    "quantwm::encode_values",
    mutates_args=(),
    schema="(Tensor v, Tensor? feedback, Tensor? book, Tensor? grid, bool learn, int[] numbers) -> Tensor[]",
)
def encode_values(v, feedback, book, grid, learn, numbers):
    """Stored tensors of values `[B, S, H, D]`, after a codebook if one is to be learned; feedback as it is kept."""
    state = _state("v", book, grid)
    if not learn:
        state.learned_at["v_centroids"] = v.shape[1]
    if feedback is not None:
        state.shared["v_feedback"] = feedback
    tensors = _method(numbers)._encode_values(v, state)
    return [tensors[name] for name in _names("v", learn, False)]


@encode_values.register_fake
def _(v, feedback, book, grid, learn, numbers):
    method = _method(numbers)
    count = method.centroid_count(v.shape[1], VALUE_TOKENS_PER_CENTROID)
    tensors = _empty_side(v, method.settings.value_bits, method.settings.group_size)
    return (_empty_book(v, count) if learn else []) + tensors


@dataclass(frozen=True)
class InGraph(encode.FusedQuantWM):
    """`FusedQuantWM` for torch.compile: the same stages, each an operator."""

    def _steer(
        self, moment: torch.Tensor | None, rank: int, tokens: int, stats: QueryStats, state: LayerState
    ) -> KeySteering:
        basis = key_basis(moment, rank, tokens, state, _directions)
        wanted = moment is not None and self.feedback
        return KeySteering(basis, _key_feedback(moment, basis, stats) if wanted else None, stats.rotation)

    def _encode_keys(
        self, k: torch.Tensor, moment: torch.Tensor | None, steering: KeySteering, state: LayerState
    ) -> dict[str, torch.Tensor]:
        count = self.centroid_count(k.shape[1], KEY_TOKENS_PER_CENTROID)
        basis = steering.basis
        angles = (None, None) if steering.rotation is None else steering.rotation.tensors
        book = _before(state, "k", k, count)
        stored = encode_keys(k, moment, steering.feedback, basis, *angles, *book, _numbers(self))
        tensors = dict(zip(_names("k", True, basis is not None), stored))
        state.learn("k_centroids", k.shape[1], **{f"k_{name}": tensors[f"k_{name}"] for name in BOOK})
        return tensors if basis is None else tensors | {"k_psac_u": basis}

    def _encode_values(self, v: torch.Tensor, state: LayerState) -> dict[str, torch.Tensor]:
        learn, tokens = state.due("v_centroids"), v.shape[1]
        if self.feedback and state.value_metric is not None and "v_feedback" not in state.shared:
            feedback = packed_weights(_feedback(state.value_metric().float()))
            state.learn("v_feedback", tokens, v_feedback=feedback)
        count = self.centroid_count(tokens, VALUE_TOKENS_PER_CENTROID)
        book = _before(state, "v", v, count) if learn else tuple(state.shared[f"v_{name}"] for name in BOOK)
        stored = encode_values(v, state.shared.get("v_feedback"), *book, learn, _numbers(self))
        tensors = dict(zip(_names("v", learn, False), stored))
        if learn:
            state.learn("v_centroids", tokens, **{f"v_{name}": tensors[f"v_{name}"] for name in BOOK})
        return tensors | {f"v_{name}": state.shared[f"v_{name}"] for name in BOOK}


def _directions(moment: torch.Tensor, rank: int) -> torch.Tensor:
    fits = moment.shape[-1] <= statistics.WIDEST and rank <= statistics.LARGEST_RANK
    return leading_eigenvectors(moment, rank) if fits else key_directions(moment, rank)


def _key_feedback(moment: torch.Tensor, basis: torch.Tensor | None, stats: QueryStats) -> torch.Tensor:
    if stats.rotation is None and moment.shape[-1] <= statistics.WIDEST:
        return feedback_weights(moment, basis)
    return _feedback(key_metric(moment, basis, stats))


def _feedback(metric: torch.Tensor) -> torch.Tensor:
    return feedback_weights(metric, None) if metric.shape[-1] <= statistics.WIDEST else feedback_matrix(metric)


def _before(state: LayerState, side: str, x: torch.Tensor, count: int) -> tuple:
    before = earlier_codebook(state, side, x.shape[0] * x.shape[2], count)
    return (None, None) if before is None else (before.codes, before.grid)


def _numbers(method: QuantWM) -> list[int]:
    return [getattr(method.settings, name) for name in NUMBERS] + [method.feedback]


def _method(numbers: list[int]) -> encode.FusedQuantWM:
    *settings, feedback = numbers
    return encode.FusedQuantWM(replace(CacheSettings(), **dict(zip(NUMBERS, settings))), bool(feedback))


def _state(side: str, book: torch.Tensor | None, grid: torch.Tensor | None) -> LayerState:
    shared = {} if book is None else {f"{side}_{name}": t for name, t in zip(BOOK, (book, grid))}
    return LayerState(shared=shared)


def _names(side: str, learned: bool, corrected: bool) -> list[str]:
    names = (BOOK if learned else ()) + STORED
    return [f"{side}_{name}" for name in names] + list(CORRECTION if corrected else ())


def _empty_book(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    batch, _, heads, width = x.shape
    codes = x.new_empty(batch * heads, count, width // 2, dtype=torch.uint8)
    return [codes, x.new_empty(batch * heads, 2, width, dtype=torch.bfloat16)]


def _empty_side(x: torch.Tensor, bits: int, group_size: int) -> list[torch.Tensor]:
    batch, tokens, heads, width = x.shape
    scales = packed_width(group_count(width, group_size), scale_format(bits)[0])
    rows = [x.new_empty(batch * heads, tokens, size, dtype=torch.uint8) for size in (packed_width(width, bits), scales)]
    ids = x.new_empty(batch * heads, tokens, dtype=torch.uint8)
    return [rows[0], ids, rows[1], x.new_empty(batch * heads, dtype=torch.bfloat16)]


def _empty_correction(x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    batch, tokens, heads, _ = x.shape
    codes = x.new_empty(batch * heads, tokens, packed_width(rank, 4), dtype=torch.uint8)
    return [codes, codes.new_empty(batch * heads, tokens), x.new_empty(batch * heads, dtype=torch.bfloat16)]

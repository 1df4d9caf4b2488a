"""How many bytes each method's span takes, from its layout alone: nothing is encoded, so a run can be planned.

Every stored tensor has an axis of heads, so a layout is stated for one row: one head of one world in one layer. The one
size that depends on values, the paper's sparse correction, is taken at its largest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from .codec.bits import packed_width
from .codec.codebook import CENTROID_BITS
from .codec.feedback import packed_count
from .codec.groups import group_count
from .codec.midrise import scale_format
from .methods.base import LayerState
from .methods.kivi import GROUP
from .methods.quantwm import KEY_TOKENS_PER_CENTROID, VALUE_TOKENS_PER_CENTROID, QuantWM, automatic_rank
from .methods.quantwm_paper import PAPER_RANK, automatic_centroids
from .methods.qvg import PRO_GROUP, PRO_STAGES
from .settings import CacheSettings
from .span import RAW

# Bytes of the types that layouts use beside packed codes.
HALF, SINGLE = 2, 4


def span_bytes(
    settings: CacheSettings, tokens: int, head_dim: int, state: LayerState, element_bytes: int = 2
) -> Counter[str]:
    """Bytes by part that a span of `tokens` tokens adds for one head of one world; 16-bit sides count as `raw`.

    Args:
        state: what earlier spans of the layer left; only its counts are used, and carried on.
        element_bytes: size of the type that keys and values come in.
    """
    parts: Counter[str] = Counter()
    raw_sides = (settings.key_bits, settings.value_bits).count(16)
    if raw_sides:
        parts[RAW] = raw_sides * tokens * head_dim * element_bytes
    parts.update(_LAYOUTS[settings.method](settings, tokens, head_dim, state))
    state.tokens += tokens
    return parts


def state_bytes(settings: CacheSettings, head_dim: int) -> int:
    """Bytes that a method keeps between spans for one head, once it has packed something."""
    if settings.method == "quantwm" and settings.value_bits != 16:
        return HALF * packed_count(head_dim)  # error feedback of values
    if settings.method == "quantwm-paper" and settings.key_bits != 16:
        return SINGLE * head_dim**2  # running moment of the queries
    return 0


def _quantwm(s: CacheSettings, tokens: int, head_dim: int, state: LayerState) -> Counter[str]:
    parts, method = Counter(), QuantWM(s)

    def codebook(tokens_per_centroid: int) -> int:
        count = method.centroid_count(tokens, tokens_per_centroid)
        return count * packed_width(head_dim, CENTROID_BITS) + 2 * HALF * head_dim

    for bits in _packed_sides(s):
        scales = packed_width(group_count(head_dim, s.group_size), scale_format(bits)[0])
        parts.update(codes=tokens * packed_width(head_dim, bits), ids=tokens, scales=tokens * scales + HALF)
    if s.key_bits != 16:
        rank = min(s.rank or automatic_rank(head_dim), head_dim)
        parts.update(centroids=codebook(KEY_TOKENS_PER_CENTROID), psac_c=tokens * (packed_width(rank, 4) + 1) + HALF)
        if _learns(state, "k_psac_u", tokens):
            parts["psac_u"] += HALF * head_dim * rank
    if s.value_bits != 16 and _learns(state, "v_centroids", tokens):
        parts["centroids"] += codebook(VALUE_TOKENS_PER_CENTROID)
    return parts


def _paper(s: CacheSettings, tokens: int, head_dim: int, state: LayerState) -> Counter[str]:
    parts = _rounding(s, tokens, head_dim, state)
    for _ in _packed_sides(s):
        count = min(tokens, s.centroids or automatic_centroids(tokens))
        parts.update(centroids=HALF * count * head_dim, ids=tokens)
    # The first span has no earlier queries to be corrected by, unless it was rehearsed.
    if s.key_bits != 16 and (state.tokens or state.earlier.weight):
        rank = min(s.rank or PAPER_RANK, head_dim)
        parts.update(psac_c=tokens * (rank + HALF), psac_u=HALF * head_dim * rank)
    return parts


def _rounding(s: CacheSettings, tokens: int, head_dim: int, state: LayerState) -> Counter[str]:
    parts, sides, groups = Counter(), _packed_sides(s), group_count(head_dim, s.group_size)
    for bits in sides:
        parts.update(codes=tokens * packed_width(head_dim, bits), scales=tokens * groups + HALF)
    # Zero-points of both sides share bytes where they are of one width.
    together = len(sides) == 2 and len(set(sides)) == 1
    widths = [packed_width(2 * groups, sides[0])] if together else [packed_width(groups, bits) for bits in sides]
    parts["zeros"] = tokens * sum(widths)
    return parts


def _kivi(s: CacheSettings, tokens: int, head_dim: int, state: LayerState) -> Counter[str]:
    parts: Counter[str] = Counter()
    if s.key_bits != 16:
        grid = HALF * group_count(tokens, GROUP) * head_dim
        parts.update(codes=tokens * packed_width(head_dim, s.key_bits), scales=grid, zeros=grid)
    if s.value_bits != 16:
        grid = HALF * tokens * group_count(head_dim, GROUP)
        parts.update(codes=tokens * packed_width(head_dim, s.value_bits), scales=grid, zeros=grid)
    return parts


def _qvg(
    s: CacheSettings, tokens: int, head_dim: int, state: LayerState, stages: int = 1, group: int = 0
) -> Counter[str]:
    parts: Counter[str] = Counter()
    count = min(tokens, s.centroids or automatic_centroids(tokens // stages))
    for bits in _packed_sides(s):
        parts.update(
            codes=tokens * packed_width(head_dim, bits),
            scales=tokens * group_count(head_dim, group or s.group_size),
            ids=tokens * stages,
            centroids=HALF * stages * count * head_dim,
        )
    return parts


def _packed_sides(s: CacheSettings) -> list[int]:
    return [bits for bits in (s.key_bits, s.value_bits) if bits != 16]


def _learns(state: LayerState, name: str, tokens: int) -> bool:
    """Whether a shared piece is learned from this span; noted, as the encoder does."""
    due = state.due(name)
    if due:
        state.learn(name, tokens)
    return due


_LAYOUTS: dict[str, Callable[[CacheSettings, int, int, LayerState], Counter[str]]] = {
    "quantwm": _quantwm,
    "quantwm-paper": _paper,
    "rtn": _rounding,
    "quarot": _rounding,
    "kivi": _kivi,
    "qvg": _qvg,
    "qvg-pro": partial(_qvg, stages=PRO_STAGES, group=PRO_GROUP),
}

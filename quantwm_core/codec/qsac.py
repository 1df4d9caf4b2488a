"""Query-sensitive assignment of centroids (QuantWM, section 3.2): judge a centroid by the logits it will disturb."""

from __future__ import annotations

import torch

from .codebook import gather_centroids
from .groups import split_groups
from .kmeans import token_chunks
from .psac import leading_eigenvectors


def channel_weights(moment: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """w_c = M_cc / mean(M_cc), float `[N, D]`; ones without statistics or where every query is zero."""
    if moment is None:
        return like.new_ones(like.shape[0], like.shape[-1])
    diagonal = moment.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1, keepdim=True)
    return torch.where(mean > 0, diagonal / mean, 1.0)


# As many as one compares where nothing else is asked for.
CANDIDATES = 4
# Centroids whose numbers agree modulo this compete for one place among the candidates, where speed matters.
BUCKETS = 64


def assign_query_sensitive(
    keys: torch.Tensor,
    centroids: torch.Tensor,
    weights: torch.Tensor,
    group_size: int,
    candidates: int,
    buckets: int | None = None,
    metric: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pick, among the nearest centroids in the query metric, the one that leaves the cheapest residual range.

    Candidates minimise d_Q(k, mu) = sum_c w_c (k_c - mu_c)^2; the winner minimises
    S(k, mu) = sum_g (sum_{c in g} w_c) R_g(k - mu)^2 with R_g the range of the group.

    Args:
        keys: float `[N, S, D]`; centroids: float `[N, K, D]`; weights: float `[N, D]`.
        buckets: candidates come from different buckets (number modulo `buckets`); None for the nearest ones exactly.
        metric: symmetric positive semidefinite `[N, D, D]`; candidates then minimise (k - mu)^T metric (k - mu).

    Returns:
        int64 `[N, S]`.
    """
    candidates = min(candidates, centroids.shape[1])
    root = weights.sqrt().unsqueeze(1) if metric is None else _root(metric)
    seen = torch.mul if metric is None else torch.matmul
    scaled = seen(centroids, root)
    half_norms = scaled.square().sum(-1).unsqueeze(1) / 2
    group_weights = split_groups(weights, group_size).sum(-1).unsqueeze(1)
    pieces = []
    for part in token_chunks(keys.shape[0], keys.shape[1], max(centroids.shape[1], keys.shape[2])):
        block = keys[:, part]
        table = half_norms - seen(block, root) @ scaled.transpose(1, 2)
        nearest = _nearest(table, candidates, buckets or table.shape[-1])
        if candidates > 1:
            pieces.append(_cheapest_range(block, centroids, nearest, group_weights, group_size))
        else:
            pieces.append(nearest[..., 0])
    return torch.cat(pieces, dim=1)


def _root(metric: torch.Tensor) -> torch.Tensor:
    """R with R R^T = metric, float `[N, D, D]`, at unit mean of the diagonal; zero where the metric is."""
    mean = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(1e-30)
    vectors = leading_eigenvectors(metric, metric.shape[-1])
    values = (vectors * (metric / mean @ vectors)).sum(1, keepdim=True)
    return vectors * values.clamp_min(0).sqrt()


def _nearest(table: torch.Tensor, candidates: int, buckets: int) -> torch.Tensor:
    """Columns int64 `[..., at most candidates]` of the lowest entries, at most one of each bucket, lowest first."""
    if table.shape[-1] <= buckets:
        return table.topk(candidates, dim=-1, largest=False, sorted=True).indices
    padded = torch.nn.functional.pad(table, (0, -table.shape[-1] % buckets), value=float("inf"))
    lowest, turn = padded.unflatten(-1, (-1, buckets)).min(-2)
    bucket = lowest.topk(min(candidates, buckets), dim=-1, largest=False, sorted=True).indices
    return turn.gather(-1, bucket) * buckets + bucket


def _cheapest_range(
    keys: torch.Tensor,
    centroids: torch.Tensor,
    nearest: torch.Tensor,
    group_weights: torch.Tensor,
    group_size: int,
) -> torch.Tensor:
    best_cost = best = None
    for column in nearest.unbind(-1):
        residual = keys - gather_centroids(centroids, column)
        # A short last group is padded with a value of its own, so that padding never widens its range.
        groups = split_groups(residual, group_size, fill=float("nan"))
        high = groups.nan_to_num(nan=float("-inf")).amax(-1)
        low = groups.nan_to_num(nan=float("inf")).amin(-1)
        cost = (group_weights * (high - low).square()).sum(-1)
        if best is None:
            best_cost, best = cost, column
        else:
            best = torch.where(cost < best_cost, column, best)
            best_cost = torch.minimum(cost, best_cost)
    return best

"""Deterministic k-means: seeded from the data's own order, no random numbers, no floating-point atomics."""

from __future__ import annotations

import math

import torch

ITERATIONS = 5
# From the codebook of the span before. On the tiny world one round is as good as two, and as five from evenly spaced
# tokens.
WARM_ITERATIONS = 1
# Bound on the [N, chunk, K] distance table, in elements (64 MiB of float32).
CHUNK_ELEMENTS = 1 << 24


def token_chunks(heads: int, tokens: int, centroids: int) -> list[slice]:
    """Slices of the token axis that keep a `[heads, chunk, centroids]` table within the bound."""
    size = max(1, CHUNK_ELEMENTS // max(1, heads * centroids))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def scatter_step(tokens: int) -> int:
    """A step, prime to `tokens` and near the golden section of it, that visits all tokens and never a pattern of them.

    Tokens lie in image order. A sample at even distances keeps meeting the same columns of the image, which doubled
    the logit error of keys on the tiny world; one in this order costs little.
    """
    step = max(1, round(tokens * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, tokens) != 1:
        step += 1
    return step


def scattered_tokens(tokens: int, count: int, device: torch.device) -> torch.Tensor:
    """Positions int64 `[min(count, tokens)]` of a sample spread over all tokens; see `scatter_step`."""
    return torch.arange(min(count, tokens), device=device) * scatter_step(tokens) % tokens


def nearest_centroid(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Index int64 `[N, S]` of the closest row of `centroids` `[N, K, D]` for each row of `x` `[N, S, D]`."""
    half_norms = centroids.square().sum(-1).unsqueeze(1) / 2
    pieces = []
    for part in token_chunks(x.shape[0], x.shape[1], centroids.shape[1]):
        pieces.append((half_norms - x[:, part] @ centroids.transpose(1, 2)).argmin(-1))
    return torch.cat(pieces, dim=1)


def evenly_spaced(tokens: int, count: int, device: torch.device) -> torch.Tensor:
    """Positions int64 `[count]` of the tokens that k-means begins with."""
    return torch.arange(count, device=device) * tokens // count


def kmeans(
    x: torch.Tensor, count: int, iterations: int = ITERATIONS, start: torch.Tensor | None = None
) -> torch.Tensor:
    """Centroids float `[N, K, D]` of `x` `[N, S, D]`, with K = min(count, S); an empty cluster keeps its centroid.

    start: centroids `[N, K, D]` to begin with; evenly spaced tokens by default.
    """
    tokens = x.shape[1]
    if start is None:
        start = x[:, evenly_spaced(tokens, min(count, tokens), x.device)]
    centroids = start.clone()
    for _ in range(iterations):
        centroids = _update(x, centroids)
    return centroids


def _update(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    heads, count, _ = centroids.shape
    sums = torch.zeros_like(centroids)
    sizes = x.new_zeros(heads, count)
    ids = nearest_centroid(x, centroids)
    for part in token_chunks(heads, x.shape[1], count):
        member = torch.nn.functional.one_hot(ids[:, part], count).to(x.dtype)
        sums += member.transpose(1, 2) @ x[:, part]
        sizes += member.sum(1)
    return torch.where(sizes[..., None] > 0, sums / sizes[..., None].clamp_min(1), centroids)

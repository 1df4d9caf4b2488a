"""Encoding on a GPU: whether kernels and eager twin agree, and where the time of a span goes.

    python -m benchmarks.encode [--json FILE] [--quick]

Milliseconds are medians of CUDA graph replays (what the GPU needs) and of plain calls (what a run sees if the host
does not run ahead). `first` learns codebooks and basis, as the first span and each doubling of the history do;
`later` reuses them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .bare_pack import bare_module

# The last is what a group of six layers packs at once.
SHAPES = (
    *((1, 12, 4680, 128), (1, 40, 6240, 128), (1, 12, 1560, 128), (1, 32, 29640, 128)),
    (6, 12, 4680, 128),
)
REPEATS = 20


def sample(shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values bf16 `[B, S, H, D]` with clusters, an offset and a decaying spectrum."""
    batch, heads, tokens, width = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device="cuda")

    decay = torch.arange(1, width + 1, device="cuda") ** -0.7 * 4
    tensors = []
    for _ in range(3):
        mixing = torch.linalg.qr(normal(heads, width, width)).Q * decay
        centres = normal(batch, heads, 200, width).gather(
            2,
            torch.randint(200, (batch, heads, tokens, 1), generator=generator, device="cuda").expand(-1, -1, -1, width),
        )
        x = (0.7 * centres + normal(batch, heads, tokens, width)) @ mixing.transpose(1, 2) + 2 * normal(heads, 1, width)
        tensors.append(x.transpose(1, 2).bfloat16().contiguous())
    return tuple(tensors)


class Span:
    """One span to encode, and the parts of encoding it as separate calls."""

    def __init__(self, shape: tuple[int, int, int, int]) -> None:
        names = ("encode", "encode_codebook", "encode_match", "encode_residual", "statistics")
        self.kernels = {name: bare_module(f"kernels.{name}") for name in names}
        self.core = bare_module("quantwm_core.methods.quantwm")
        self.base = bare_module("quantwm_core.methods.base")
        stats = bare_module("quantwm_core.query_stats")
        self.q, self.k, self.v = sample(shape)
        self.method = self.core.QuantWM(bare_module("quantwm_core.settings").CacheSettings())
        self.moment = stats.second_moment(self.q)
        self.stats = stats.QueryStats(self.moment)
        metric = torch.randn(shape[1], shape[3], 2 * shape[3], device="cuda")
        self.metric = metric @ metric.transpose(1, 2)

    def state(self) -> Any:
        return self.base.LayerState(lambda: self.metric)

    def first(self) -> Any:
        return self.kernels["encode"].encode_span(self.method, self.k, self.v, self.stats, self.state())

    def later(self, state: Any) -> Any:
        state.tokens = 0
        return self.kernels["encode"].encode_span(self.method, self.k, self.v, self.stats, state)

    def eager(self) -> Any:
        return self.method.encode(self.k, self.v, self.stats, self.state())

    def phases(self) -> dict[str, Callable[[], Any]]:
        """The stages of `kernels.encode`, by name."""
        code, pairs = self.kernels, self.kernels["encode_match"]
        tokens = self.k.shape[1]
        key_count = self.method.centroid_count(tokens, self.core.KEY_TOKENS_PER_CENTROID)
        value_count = self.method.centroid_count(tokens, self.core.VALUE_TOKENS_PER_CENTROID)
        moment = self.moment.flatten(0, 1)
        centroids = code["encode_codebook"].learn_centroids(self.k, key_count)
        book, operands = code["encode_codebook"].round_codebook(centroids, moment, self.k.dtype)
        matched = pairs.match(self.k, book, operands, 2, 64, self.method.candidates)
        basis = code["statistics"].leading_eigenvectors(moment, 16)
        feedback = code["statistics"].feedback_weights(moment, basis)
        residual = code["encode_residual"]
        _, raw, peaks = residual.encode_residual("k", self.k, book, matched, 2, 64, feedback, basis)
        value_book, value_operands = code["encode_codebook"].round_codebook(
            code["encode_codebook"].learn_centroids(self.v, value_count), None, self.v.dtype
        )
        value_match = pairs.match(self.v, value_book, value_operands, 2, 64)
        return {
            "query moment": lambda: code["statistics"].second_moment(self.q),
            "key centroids": lambda: code["encode_codebook"].learn_centroids(self.k, key_count),
            "key centroids, warm": lambda: code["encode_codebook"].learn_centroids(self.k, key_count, book),
            "key codebook": lambda: code["encode_codebook"].round_codebook(centroids, moment, self.k.dtype),
            "key match": lambda: pairs.match(self.k, book, operands, 2, 64, self.method.candidates),
            "basis": lambda: code["statistics"].leading_eigenvectors(moment, 16),
            "key feedback": lambda: code["statistics"].feedback_weights(moment, basis),
            "key codes": lambda: residual.encode_residual("k", self.k, book, matched, 2, 64, feedback, basis),
            "coefficients": lambda: residual.encode_coefficients(raw, peaks),
            "value centroids": lambda: code["encode_codebook"].learn_centroids(self.v, value_count),
            "value match": lambda: pairs.match(self.v, value_book, value_operands, 2, 64),
            "value codes": lambda: residual.encode_residual("v", self.v, value_book, value_match, 2, 64, feedback),
        }


def median_ms(call: Callable[[], Any]) -> float:
    """Median over calls between CUDA events."""
    for _ in range(3):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def replay_ms(call: Callable[[], Any]) -> float:
    """Median of replays of the call captured in a graph; capture fails if the call waits for the device."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return median_ms(graph.replay)


def check(span: Span) -> dict[str, float]:
    """Errors of kernels and eager twin against the input, and whether two encodings are the same to the bit."""
    fused, again, eager = span.first(), span.first(), span.eager()
    same = all(torch.equal(t, again.tensors[name]) for name, t in fused.tensors.items())
    result = {"deterministic": float(same)}
    for name, encoded in (("kernels", fused), ("eager", eager)):
        k, v = span.method.decode(encoded)
        weighted = (k - span.k).float().transpose(1, 2)
        result[f"{name}_logit"] = torch.einsum("bhsd,bhde,bhse->", weighted, span.moment, weighted).item()
        result[f"{name}_value"] = (v - span.v).float().square().mean().item()
    result["logit_ratio"] = result["kernels_logit"] / result["eager_logit"]
    result["value_ratio"] = result["kernels_value"] / result["eager_value"]
    return result


def measure(shape: tuple[int, int, int, int], quick: bool) -> dict[str, Any]:
    span = Span(shape)
    row: dict[str, Any] = {"shape": shape, "check": check(span)}
    state = span.state()
    held = span.kernels["encode"].encode_span(span.method, span.k, span.v, span.stats, state)
    state.learned_at = dict.fromkeys(state.learned_at, 1 << 40)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = span.later(state)
    row["workspace_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    row["span_mib"] = sum(t.nbytes for t in kept.tensors.values()) / 2**20
    del held, kept
    row["first_ms"], row["first_plain_ms"] = replay_ms(span.first), median_ms(span.first)
    row["later_ms"], row["later_plain_ms"] = (f(lambda: span.later(state)) for f in (replay_ms, median_ms))
    if not quick:
        row["eager_ms"] = median_ms(span.eager)
    row["phases_us"] = {name: 1000 * replay_ms(call) for name, call in span.phases().items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="two shapes, without timing the eager twin")
    options = parser.parse_args()
    rows = []
    for shape in SHAPES[:: 3 if options.quick else 1]:
        row = measure(shape, options.quick)
        rows.append(row)
        print(shape, {name: round(value, 4) for name, value in row["check"].items()})
        print({name: round(value, 3) for name, value in row.items() if isinstance(value, float)})
        print({name: round(value, 1) for name, value in row["phases_us"].items()}, flush=True)
    if options.json:
        options.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

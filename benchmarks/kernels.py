"""Speed of every operation on packed keys and values, against ceilings measured in the same run.

    python -m benchmarks.kernels [--json FILE] [--quick]

One layer of each model: keys and values are encoded, decoded into the attention layout, and attended to, by each
implementation that can do it here. `ms` is the GPU's time, `host_ms` the time to issue the call. `gb_per_s` counts each
byte once that has to be read or written; `share_of_ceiling` is of the copy bandwidth for what moves bytes and of the
bf16 matrix rate for attention.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .bare_pack import bare_module
from .report import parser, print_table, write_json

COLUMNS = "op shape backend ms host_ms gb_per_s tflop_per_s share_of_ceiling".split()

SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# More than any L2 cache, and about a millisecond for the caller to issue what is timed.
L2_BYTES = 256 << 20
SLEEP_CYCLES = 2_000_000


@dataclass(frozen=True)
class Case:
    """One layer of a model: blocks of tokens in its history, and the queries of one more block."""

    model: str
    blocks: tuple[int, ...]
    heads: int
    head_dim: int
    queries: int
    eager: bool = False

    @property
    def shape(self) -> str:
        """[B, H, S, D] of the history."""
        return f"1,{self.heads},{sum(self.blocks)},{self.head_dim}"


CASES = (
    Case("causal-forcing", (4680,), 12, 128, 4680, eager=True),
    Case("causal-forcing", (4680,) * 3, 12, 128, 4680),
    Case("causal-forcing", (4680,) * 8, 12, 128, 4680),
    Case("causal-forcing-framewise", (1560,) * 24, 12, 128, 1560),
    Case("longcat", (29640,), 32, 128, 7800),
    Case("lingbot-v2", (6240,), 40, 128, 6240),
    Case("hy-5b", (3520,) * 4, 24, 256, 3520),
    Case("matrix-game-2", (2640,) * 2, 12, 128, 2640),
)
QUICK_CASES = (Case("tiny-world", (288,) * 3, 4, 48, 288, eager=True), Case("small", (512,), 4, 128, 256, eager=True))


def median_ms(run: Callable, repeats: int = 15) -> tuple[float, float]:
    """Median time of a call with cold caches, and the time the caller's thread takes to issue it, in milliseconds.

    On a GPU the device is kept busy until everything is issued, so that its time holds no waiting for the caller.
    """
    run()
    if not torch.cuda.is_available():
        times = [_seconds(run) for _ in range(3)]
        return 1000 * statistics.median(times), 1000 * statistics.median(times)
    torch.cuda.synchronize()
    flush = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    spans, issued = [], []
    for _ in range(repeats):
        flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        issued.append(_seconds(run))
        stop.record()
        torch.cuda.synchronize()
        spans.append(start.elapsed_time(stop))
    return statistics.median(spans), 1000 * statistics.median(issued)


def _seconds(run: Callable) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ceilings(device: torch.device, quick: bool) -> dict[str, float]:
    """Copy bandwidth in GB/s, reads and writes counted, and the bf16 matrix rate in TFLOP/s."""
    length, size = (1 << 22, 512) if quick else (1 << 30, 8192)
    source = torch.randint(0, 256, (length,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms, _ = median_ms(lambda: target.copy_(source))
    a, b = torch.randn(2, size, size, device=device).bfloat16()
    matmul_ms, _ = median_ms(lambda: a @ b)
    return {"copy_gb_per_s": 2 * length / copy_ms / 1e6, "matmul_tflop_per_s": 2 * size**3 / matmul_ms / 1e9}


class Bench:
    """Rows of one run, over the pack's own registry of implementations."""

    def __init__(self, device: torch.device, limits: dict[str, float]) -> None:
        self.device = device
        self.limits = limits
        self.rows: list[dict] = []
        bare_module("kernels")
        self.core = {
            name: bare_module(f"quantwm_core.{name}")
            for name in ("backends", "layer_cache", "methods", "query_stats", "settings", "span")
        }
        self.settings = self.core["settings"].CacheSettings()
        self.method = self.core["methods"].build_method(self.settings)

    def add(self, op: str, shape: str, backend: str, run: Callable, moved: int = 0, flop: int = 0) -> None:
        """Time a call and note it; one that cannot run here is noted with the reason."""
        row = {"op": op, "shape": shape, "backend": backend}
        try:
            ms, host_ms = median_ms(run)
        except (RuntimeError, NotImplementedError) as error:
            self.rows.append(row | {"ms": None, "reason": str(error).splitlines()[0]})
            return
        bandwidth = moved / ms / 1e6 if moved else None
        rate = flop / ms / 1e9 if flop else None
        share = rate / self.limits["matmul_tflop_per_s"] if flop else bandwidth / self.limits["copy_gb_per_s"]
        figures = {"ms": ms, "host_ms": host_ms, "gb_per_s": bandwidth, "tflop_per_s": rate}
        self.rows.append(row | figures | {"share_of_ceiling": share})

    def case(self, case: Case) -> None:
        """All operations on one layer."""
        layer = self.core["layer_cache"].LayerCache(self.settings, self.method, self._metric(case), self.device)
        for tokens in case.blocks:
            q, k, v = self._structured(tokens, case)
            layer.append(k, v, q)
            layer.commit()
        self._encode(case, q, k, v)
        history = [entry.stored for entry in layer.entries]
        self._decode(case, history)
        self._attend(case, history)

    def _metric(self, case: Case) -> Callable[[], torch.Tensor]:
        eye = torch.eye(case.head_dim, device=self.device)
        return lambda: eye.expand(case.heads, case.head_dim, case.head_dim)

    def _structured(self, tokens: int, case: Case) -> list[torch.Tensor]:
        """Queries, keys and values like those of a model: clusters of unequal spread, plus noise."""
        spread = torch.logspace(0.5, -0.5, case.head_dim, device=self.device)
        made = []
        for _ in range(3):
            centers = torch.randn(64, case.heads, case.head_dim, device=self.device) * spread
            choice = torch.randint(0, 64, (tokens,), device=self.device)
            noise = torch.randn(tokens, case.heads, case.head_dim, device=self.device)
            made.append((centers[choice] + 0.5 * noise).unsqueeze(0).bfloat16())
        return made

    def _implementations(self, operation: str, like: torch.Tensor, eager: bool) -> Iterator:
        backends = self.core["backends"]
        facts = backends.settings_facts(self.settings) | backends.device_facts(self.device)
        facts |= dict(zip(("batch", "tokens", "heads", "head_dim"), like.shape)) | {"dtype": like.dtype}
        for entry in backends.registered(operation):
            if eager if entry.backend == backends.EAGER else not entry.refusals(facts):
                yield entry

    def _encode(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        shape = f"1,{case.heads},{k.shape[1]},{case.head_dim}"
        for entry in self._implementations("second_moment", q, case.eager):
            self.add("second_moment", shape, entry.backend, partial(entry.run, q), moved=q.nbytes)
        stats = self.core["query_stats"].QueryStats(own=self.core["query_stats"].second_moment(q))
        new_state = partial(self.core["methods"].LayerState, self._metric(case))
        for entry in self._implementations("encode_span", k, case.eager):
            moved = k.nbytes + v.nbytes
            encode = partial(entry.run, self.method, k, v, stats)
            self.add("encode_span, learning", shape, entry.backend, lambda encode=encode: encode(new_state()), moved)
            state = new_state()
            encode(state)

            def again(encode=encode, state=state) -> None:
                # Codebook and basis are learned again only when the history has doubled.
                state.tokens = 0
                encode(state)

            self.add("encode_span", shape, entry.backend, again, moved)

    def _decode(self, case: Case, history: list) -> None:
        tokens = sum(piece.tokens for piece in history)
        packed = self.core["span"].storage_bytes(t for piece in history for t in piece.tensors.values())
        for dtype, note in ((torch.bfloat16, ""), (torch.float16, " fp16")):
            keys, values = torch.empty(2, 1, tokens, case.heads, case.head_dim, dtype=dtype, device=self.device)
            moved = packed + keys.nbytes + values.nbytes
            for entry in self._implementations("decode_layer", keys, case.eager):
                run = partial(entry.run, self.method, history, keys, values)
                self.add("decode_layer", case.shape + note, entry.backend, run, moved)
        source, target = torch.empty(2, moved // 2, dtype=torch.uint8, device=self.device)
        self.add("copy of as many bytes", case.shape, "torch", lambda: target.copy_(source), moved)

    def _attend(self, case: Case, history: list) -> None:
        q, k, v = self._structured(case.queries, case)
        pieces = [*history, self.core["span"].RawBlock(k, v)]
        tokens = sum(piece.tokens for piece in pieces)
        shape = f"{case.queries} q, {case.shape}"
        flop = 4 * case.queries * tokens * case.heads * case.head_dim
        keys, values = torch.empty(2, 1, tokens, case.heads, case.head_dim, dtype=torch.bfloat16, device=self.device)
        for decode in self._implementations("decode_layer", keys, True):
            decode.run(self.method, pieces, keys, values)
            break
        plain = [t.transpose(1, 2) for t in (q, keys, values)]
        for name, backend in SDPA.items():
            self.add("sdpa on bf16", shape, name, partial(_sdpa, backend, *plain), flop=flop)
        if self.device.type == "cuda":
            reading, tables = bare_module("kernels.reading"), bare_module("kernels.tables")
            table, live = tables.piece_table(history, self.device), pieces[-1]
            for name, attend in (
                ("packed", partial(reading.attend_spans, table)),
                ("pieces", partial(reading.attend_parts, [table])),
            ):
                self.add("attend_packed", shape, name, partial(attend, live, q), flop=flop)


def _sdpa(backend: SDPBackend, *plain: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel([backend]):
        return torch.nn.functional.scaled_dot_product_attention(*plain)


def main() -> None:
    """Run the benchmark; see the module's text."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--models", nargs="*", metavar="NAME", help="only the cases of these models")
    arguments = options.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    # Large cases take minutes without a GPU.
    quick = arguments.quick or device.type == "cpu"
    limits = ceilings(device, quick)
    bench = Bench(device, limits)
    for name, value in limits.items():
        print(f"{name} {value:.4g}")
    for case in QUICK_CASES if quick else CASES:
        if arguments.models and case.model not in arguments.models:
            continue
        done = len(bench.rows)
        bench.case(case)
        # Case by case: what was measured survives a run that is cut short.
        print_table(bench.rows[done:], COLUMNS)
        write_json(arguments.json, "benchmarks.kernels", bench.rows, ceilings=limits, triton=_triton_version())


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


if __name__ == "__main__":
    main()

"""attend_packed on a GPU: the ways to attend to a packed history, and which of them is fastest where.

Ways:
- host: decode the layer into a workspace, then the attention function that the host chose;
- cudnn, flash, efficient: the same workspace, then that backend of the installed torch;
- packed: no workspace at all, see `attention`; tried for few queries, and where a whole layer does not fit;
- pieces: decode a bounded part at a time, merge the parts' results by their log-sum-exp; tried where it does not fit;
- corrected: with the settings' `jensen` on, in the place of all others but packed: see `quantwm_core.jensen`.
They are timed once per shape, where length counts by powers of two; a way must win clearly to replace an earlier one,
so that the choice, and with it the last bits of the result, stays the same from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..quantwm_core import operations
from ..quantwm_core.backends import Between, OneOf, register
from ..quantwm_core.compiling import uncompiled
from ..quantwm_core.methods import Method
from ..quantwm_core.span import PackedSpan, RawBlock
from .attention import attend_spans, exact_costs
from .decode import FAILURES, READABLE, launch_decode, nothing_of
from .tables import PieceTable, layer_tables, on_device

SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# The packed kernel decodes the history again for every 32 queries: with more than this it cannot win.
FEW_QUERIES = 256
CLEARLY_FASTER = 0.9
# Relative error beyond which a way is wrong: rounding in bf16 gives less than 0.01.
DISAGREEMENT = 0.05
TIMED_RUNS = 3
# Share of the free memory that a decoded layer may take, and the size of one part when it may not.
WORKSPACE_SHARE = 0.8
PART_BYTES = 256 << 20

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_chosen: dict[tuple, tuple[str, str]] = {}


def explain(facts: dict) -> str:
    """What was chosen for calls like this one, and by which times, for the run's record."""
    shape = tuple(facts[name] for name in ("batch", "tokens", "heads", "head_dim"))
    wanted = (facts["dtype"], shape, facts["jensen"])
    return "; ".join(why for key, (_, why) in _chosen.items() if key[1:4] == wanted)


@register(
    "attend_packed",
    "triton",
    {
        "device": OneOf(("cuda",)),
        "capability": Between((8, 0)),
        "dtype": OneOf((torch.bfloat16, torch.float16)),
        "head_dim": Between(16, 256),
    },
    failures=FAILURES,
    explain=explain,
)
def attend_packed(
    queries: torch.Tensor,
    pieces: Sequence[RawBlock | PackedSpan],
    method: Method,
    attention: Attention,
    read: Callable[[], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Twin of `quantwm_core.operations.attend_packed` by the fastest way that fits the memory."""
    tokens = sum(piece.tokens for piece in pieces)
    jensen = method.settings.jensen
    key = (queries.device, queries.dtype, tuple(queries.shape), jensen, tokens.bit_length(), _kinds(pieces))
    corrected = partial(operations.attend_packed, queries, pieces, method, attention, read)
    packed = partial(_attend_packed, queries, pieces, method)
    if key not in _chosen:
        if jensen == "off":
            _chosen[key] = _choose(queries, pieces, attention, read, tokens, packed)
        else:
            _chosen[key] = _choose_corrected(queries, pieces, jensen, tokens, packed, corrected)
    way = _chosen[key][0]
    if way == "packed":
        return packed().flatten(2)
    if way == "corrected":
        return corrected()
    if way != "pieces":
        try:
            return _attend(way, queries, *read(), attention)
        except torch.OutOfMemoryError:
            if not _readable(pieces):
                raise
            # It fitted when the ways were timed; in parts it still does.
            way = "pieces"
            _chosen[key] = way, "pieces (a decoded layer no longer fitted the memory)"
    return attend_parts(layer_tables(pieces[:-1], queries.device), pieces[-1], queries).flatten(2)


def _attend_packed(queries: torch.Tensor, pieces: Sequence[RawBlock | PackedSpan], method: Method) -> torch.Tensor:
    """Attention `[B, T, H, D]` straight on packed pieces, corrected as the settings say."""
    *history, live = pieces
    (table,) = layer_tables(history, queries.device)
    jensen = method.settings.jensen
    costs = exact_costs([on_device(p, queries.device) for p in history], queries, method) if jensen == "exact" else None
    return attend_spans(table, live, queries, jensen, costs)


def _attend(way: str, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attention: Attention):
    if way == "host":
        return attention(queries, keys, values)
    query, key, value = (t.transpose(1, 2) for t in (queries, keys, values))
    if way == "cudnn":
        # Called directly: choosing it through torch's switches costs as much time as issuing it.
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, False)[0]
    else:
        with sdpa_kernel([SDPA[way]]):
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    return out.transpose(1, 2).flatten(2)


def _kinds(pieces: Sequence[RawBlock | PackedSpan]) -> frozenset:
    """Formats of the packed pieces, which decide what can read them and how fast."""
    return frozenset(piece.format for piece in pieces if isinstance(piece, PackedSpan))


def _readable(pieces: Sequence[RawBlock | PackedSpan]) -> bool:
    """Whether kernels can read all packed pieces."""
    return all(READABLE["method"].refusal("method", method) is None for method, *_ in _kinds(pieces))


def packed_refusal(
    pieces: Sequence[RawBlock | PackedSpan], queries: int, fits: bool, jensen: str = "off"
) -> str | None:
    """Why the packed kernel does not read these pieces, or is not worth trying, or None."""
    kinds = _kinds(pieces)
    if not kinds:
        return "nothing is packed yet"
    if any(method != "quantwm" for method, *_ in kinds):
        return "packed reads method quantwm only"
    if any(16 in (key_bits, value_bits) for _, key_bits, value_bits, *_ in kinds):
        return "packed needs both keys and values packed"
    if len({kind[:4] for kind in kinds}) > 1:
        return "packed reads spans of one width only"
    if jensen == "exact" and any(key_bits != 2 for _, key_bits, *_ in kinds):
        return "packed corrects 2-bit keys only in the exact form"
    if fits and queries > FEW_QUERIES:
        return f"packed is not tried for more than {FEW_QUERIES} queries"
    return None


@uncompiled
def _choose_corrected(
    queries: torch.Tensor,
    pieces: Sequence[RawBlock | PackedSpan],
    jensen: str,
    tokens: int,
    packed: Callable[[], torch.Tensor],
    corrected: Callable[[], torch.Tensor],
) -> tuple[str, str]:
    """The way with corrected logits and the reason: the eager twin, or packed where that is faster or alone fits."""
    # The eager twin widens keys and values, or has a bias as large as its tables may be, beside the decoded layer.
    fits = _workspace_fits(queries, 2 * tokens)
    refusal = packed_refusal(pieces, queries.shape[1], fits, jensen)
    if refusal:
        return "corrected", f"{queries.shape[1]} queries on {tokens} keys: corrected ({refusal})"
    if not fits:
        return (
            "packed",
            f"{queries.shape[1]} queries on {tokens} keys: packed (a decoded layer does not fit the memory)",
        )
    times = {"corrected": _time(corrected), "packed": _time(packed)}
    told = ", ".join(f"{way} {ms:.2f} ms" for way, ms in times.items())
    best = "packed" if times["packed"] < CLEARLY_FASTER * times["corrected"] else "corrected"
    if best == "packed" and not _agree(packed(), corrected()):
        best, told = "corrected", f"{told}, packed disagrees with decoding on this GPU and Triton"
    return best, f"{queries.shape[1]} queries on {tokens} keys: {best} ({told})"


@uncompiled
def _choose(
    queries, pieces, attention: Attention, read: Callable, tokens: int, packed: Callable[[], torch.Tensor]
) -> tuple[str, str]:
    """The way for this shape and the reason, by timing what fits."""
    times: dict[str, float] = {}
    remarks = []
    fits = _workspace_fits(queries, tokens)
    if not fits and not _readable(pieces):
        return "host", "host (kernels do not read this method in parts)"
    if fits:
        # Timed before its result is kept: two workspaces may not fit.
        decode_ms = _time(read)
        keys, values = read()
        for way in ("host", *SDPA):
            times[way] = decode_ms + _time(partial(_attend, way, queries, keys, values, attention))
        expected = partial(_attend, "host", queries, keys, values, attention)
    else:
        remarks.append("a decoded layer does not fit the memory")
        expected = partial(attend_parts, layer_tables(pieces[:-1], queries.device), pieces[-1], queries)
        times["pieces"] = _time(expected)
    refusal = packed_refusal(pieces, queries.shape[1], fits)
    packed_ms = float("inf") if refusal else _time(packed)
    if packed_ms < float("inf") and not _agree(packed(), expected()):
        refusal = "packed disagrees with decoding on this GPU and Triton"
    if refusal:
        remarks.append(refusal)
    else:
        times["packed"] = packed_ms
    best = next(iter(times))
    for way, ms in times.items():
        if ms < CLEARLY_FASTER * times[best]:
            best = way
    told = [f"{way} {ms:.2f} ms" for way, ms in times.items() if ms != float("inf")] + remarks
    return best, f"{queries.shape[1]} queries on {tokens} keys: {best} ({', '.join(told)})"


def _agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two ways gave the same up to rounding; compilers have got products wrong before."""
    difference = actual.flatten(2).float() - expected.flatten(2).float()
    return bool(difference.norm() < DISAGREEMENT * expected.float().norm())


def _workspace_fits(queries: torch.Tensor, tokens: int) -> bool:
    batch, _, heads, head_dim = queries.shape
    needed = 2 * batch * tokens * heads * head_dim * queries.element_size()
    free, _ = torch.cuda.mem_get_info(queries.device)
    cached = torch.cuda.memory_reserved(queries.device) - torch.cuda.memory_allocated(queries.device)
    return needed < WORKSPACE_SHARE * (free + cached)


def _time(run: Callable) -> float:
    """Milliseconds, the best of a few runs; infinite for a way that this torch or GPU does not have."""
    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except FAILURES:
        return float("inf")
    best = float("inf")
    for _ in range(TIMED_RUNS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop))
    return best


def attend_parts(tables: Sequence[PieceTable], live: RawBlock, queries: torch.Tensor) -> torch.Tensor:
    """Attention `[B, T, H, D]` with a workspace of at most about PART_BYTES: decode a part, attend, merge."""
    result = attend_with_lse(queries, live.k, live.v)
    for table in tables:
        for keys, values in _parts(table, live, queries):
            result = merge(*result, *attend_with_lse(queries, keys, values))
    return result[0].to(queries.dtype).transpose(1, 2)


def _parts(table: PieceTable, live: RawBlock, queries: torch.Tensor) -> Iterator[torch.Tensor]:
    """Keys and values `[2, B, S, H, D]` of a table, a bounded part at a time."""
    batch, _, heads, head_dim = queries.shape
    chunk = max(1, PART_BYTES // (2 * batch * heads * head_dim * queries.element_size() * _chunk_tokens(table)))
    for first in range(0, len(table.tiles), chunk):
        part = slice(first, first + chunk)
        tokens = table.first_token(part.stop) - table.first_token(part.start)
        both = torch.empty(2, batch, tokens, heads, head_dim, dtype=queries.dtype, device=queries.device)
        launch_decode(table, nothing_of(live), *both, part)
        yield both


def _chunk_tokens(table: PieceTable) -> int:
    return -(-table.tokens // max(1, len(table.tiles)))


def attend_with_lse(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple:
    """Flash attention and the log of each query's softmax sum: float32 `[B, H, T, D]` and `[B, H, T]`."""
    q, k, v = (t.transpose(1, 2) for t in (queries, keys, values))
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    else:
        missing = -q.shape[-1] % 8
        padded = (torch.nn.functional.pad(t, (0, missing)) for t in (q, k, v)) if missing else (q, k, v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(*padded, scale=q.shape[-1] ** -0.5)[:2]
    return out[..., : q.shape[-1]].float(), lse


def merge(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> tuple:
    """Attention over the union of two sets of keys from the attention over each."""
    total = torch.logaddexp(lse, other_lse)
    weight, other_weight = (lse - total).exp().unsqueeze(-1), (other_lse - total).exp().unsqueeze(-1)
    return out * weight + other * other_weight, total

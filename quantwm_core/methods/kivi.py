"""`kivi`: keys rounded per channel over groups of tokens, values per token, the newest tokens kept (arXiv 2402.02750).

Steps and minima are FP16, groups have 32 members on either side, and 128 tokens stay in full precision: the paper's
settings. A video's blocks are no multiple of 32 tokens, so the cache hands over whole groups only, counted from the
start of the history, and the rest waits with the newest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..codec.bits import pack_bits, unpack_bits
from ..codec.minmax import minmax_dequantize, minmax_grid, minmax_quantize
from ..jensen import KeySteps
from ..query_stats import QueryStats
from ..settings import CacheSettings
from ..span import PackedSpan, by_heads, from_heads
from .base import LayerState, raw_copy

GROUP = 32
RECENT_TOKENS = 128


@dataclass(frozen=True)
class KIVI:
    settings: CacheSettings
    name: str = "kivi"

    uses_queries = False
    uses_earlier_queries = False
    rehearses = False
    recent_tokens = RECENT_TOKENS
    token_group = GROUP

    def encode(self, k: torch.Tensor, v: torch.Tensor, stats: QueryStats, state: LayerState) -> PackedSpan:
        batch, tokens, heads, head_dim = k.shape
        s = self.settings
        tensors = {"k_raw": raw_copy(k)} if s.key_bits == 16 else _encode_keys(by_heads(k), s.key_bits)
        tensors |= {"v_raw": raw_copy(v)} if s.value_bits == 16 else _encode_values(by_heads(v), s.value_bits)
        state.tokens += tokens
        tensors = {n: t if n.endswith("_raw") else t.unflatten(0, (batch, heads)) for n, t in tensors.items()}
        form = (s.key_bits, s.value_bits, GROUP, 0, k.dtype)
        return PackedSpan(self.name, tokens, heads, head_dim, *form, tensors, rotation=stats.rotation)

    def decode(self, span: PackedSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, S, H, D]` in the dtype they came in."""
        flat = span.by_head()
        keys, values = flat.get("k_raw"), flat.get("v_raw")
        if keys is None:
            codes = unpack_bits(flat["k_codes"], span.key_bits, span.head_dim).transpose(1, 2)
            codes = torch.nn.functional.pad(codes, (span.phase, 0))
            step, low = (flat[name].transpose(1, 2) for name in ("k_group_scales", "k_group_zeros"))
            decoded = minmax_dequantize(codes, step, low, GROUP)[..., span.phase :].transpose(1, 2)
            keys = from_heads(span.turned_by_heads(decoded), span.batch, span.dtype)
        else:
            keys = span.turned(keys)
        if values is None:
            codes = unpack_bits(flat["v_codes"], span.value_bits, span.head_dim)
            decoded = minmax_dequantize(codes, flat["v_scales"], flat["v_zeros"], GROUP)
            values = from_heads(decoded, span.batch, span.dtype)
        return keys, values

    def key_steps(self, span: PackedSpan) -> list[KeySteps]:
        """One level a token group, with a step of its own for every channel."""
        levels = span.by_head()["k_group_scales"].float()
        group = (span.phase + torch.arange(span.tokens, device=levels.device)) // GROUP
        return [KeySteps(levels, group.view(1, -1, 1).expand(len(levels), -1, -1), 1)]


def _encode_keys(x: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """From float `[N, S, D]`: codes a token `[N, S, ...]`, steps and minima a token group `[N, ceil(S / 32), D]`."""
    along_tokens = x.transpose(1, 2)
    step, low = minmax_grid(along_tokens, bits, GROUP)
    codes = minmax_quantize(along_tokens, step, low, bits, GROUP)
    return {
        "k_codes": pack_bits(codes.transpose(1, 2), bits).contiguous(),
        "k_group_scales": step.transpose(1, 2).contiguous(),
        "k_group_zeros": low.transpose(1, 2).contiguous(),
    }


def _encode_values(x: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    step, low = minmax_grid(x, bits, GROUP)
    codes = minmax_quantize(x, step, low, bits, GROUP)
    return {"v_codes": pack_bits(codes, bits), "v_scales": step, "v_zeros": low}

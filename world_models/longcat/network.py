"""LongCat-Video's network: a single-stream video transformer whose frames have noise levels of their own.

Layer names are those of the Wan-style repack, so that weights and LoRAs in them fit as they are; `checkpoint` renames
the official ones. Facts: the public code of LongCat-Video (meituan-longcat/LongCat-Video). Modulation, norms and the
last layer are computed in float32 there and here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import comfy.ldm.common_dit
import comfy.ops
import torch
import torch.nn as nn
from comfy.ldm.flux.math import apply_rope1
from comfy.ldm.modules.attention import optimized_attention
from torch.nn.functional import layer_norm, linear, pad, silu

from .positions import positions

if TYPE_CHECKING:
    from .cache import GivenCache
    from .run import LongCatRun

EPS = 1e-6
TEXT_TOKENS = 512
# Under which the options of a forward hold the run that it belongs to.
RUN_KEY = "quantwm_longcat_run"

# q, k, v `[B, S, H, D]`, all before RoPE -> `[B, S, H * D]`.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class LongCatAttention(nn.Module):
    """Projections of self- or cross-attention, with a norm on every head's queries and keys."""

    def __init__(self, dim: int, num_heads: int, settings: dict[str, Any]) -> None:
        super().__init__()
        make, rest = settings["operations"], {"device": settings["device"], "dtype": settings["dtype"]}
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        for name in ("q", "k", "v", "o"):
            setattr(self, name, make.Linear(dim, dim, **rest))
        self.norm_q = make.RMSNorm(self.head_dim, eps=EPS, **rest)
        self.norm_k = make.RMSNorm(self.head_dim, eps=EPS, **rest)

    def project(self, x: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries of `x` `[B, T, C]`, keys and values of `source` `[B, S, C]`; by head, `[B, T or S, H, D]`."""
        q, k, v = (
            t.unflatten(-1, (self.num_heads, self.head_dim)) for t in (self.q(x), self.k(source), self.v(source))
        )
        return self.norm_q(q), self.norm_k(k), v


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int, settings: dict[str, Any]) -> None:
        super().__init__()
        make, rest = settings["operations"], {"device": settings["device"], "dtype": settings["dtype"]}
        self.w1 = make.Linear(dim, hidden, bias=False, **rest)
        self.w2 = make.Linear(hidden, dim, bias=False, **rest)
        self.w3 = make.Linear(dim, hidden, bias=False, **rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class LongCatBlock(nn.Module):
    def __init__(self, dim: int, ffn_dim: int, num_heads: int, step_dim: int, settings: dict[str, Any]) -> None:
        super().__init__()
        make, rest = settings["operations"], {"device": settings["device"], "dtype": settings["dtype"]}
        self.modulation = nn.Sequential(nn.SiLU(), make.Linear(step_dim, 6 * dim, **rest))
        self.self_attn = LongCatAttention(dim, num_heads, settings)
        self.norm3 = make.LayerNorm(dim, eps=EPS, **rest)
        self.cross_attn = LongCatAttention(dim, num_heads, settings)
        self.ffn = SwiGLU(dim, ffn_dim, settings)

    def forward(
        self, x: torch.Tensor, steps: torch.Tensor, attend: Attend, text: Text | None, clean: int = 0
    ) -> torch.Tensor:
        """One block over tokens `[B, S, C]`.

        Args:
            steps: embedded noise levels float32 `[B, frames or 1, E]`.
            attend: self-attention of this block.
            clean: tokens at the start that do not look at the text; all of them when `text` is None.
        """
        shift1, scale1, gate1, shift2, scale2, gate2 = in_float32(self.modulation[1], silu(steps))[:, :, None].chunk(
            6, dim=-1
        )
        y = modulated(x, shift1, scale1)
        x = gated(x, self.self_attn.o(attend(*self.self_attn.project(y, y))), gate1)
        if text is not None:
            asking = x[:, clean:]
            asking = asking + text.attended(self.cross_attn, self.norm3(asking))
            x = torch.cat((x[:, :clean], asking), dim=1) if clean else asking
        return gated(x, self.ffn(modulated(x, shift2, scale2)), gate2)


class LongCatHead(nn.Module):
    def __init__(self, dim: int, out: int, step_dim: int, settings: dict[str, Any]) -> None:
        super().__init__()
        make, rest = settings["operations"], {"device": settings["device"], "dtype": settings["dtype"]}
        self.head = make.Linear(dim, out, **rest)
        self.modulation = nn.Sequential(nn.SiLU(), make.Linear(step_dim, 2 * dim, **rest))

    def forward(self, x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        shift, scale = in_float32(self.modulation[1], silu(steps))[:, :, None].chunk(2, dim=-1)
        return in_float32(self.head, modulated(x, shift, scale))


class StepEmbedding(nn.Module):
    def __init__(self, freq_dim: int, step_dim: int, settings: dict[str, Any]) -> None:
        super().__init__()
        make, rest = settings["operations"], {"device": settings["device"], "dtype": settings["dtype"]}
        self.freq_dim = freq_dim
        self.mlp = nn.Sequential(
            make.Linear(freq_dim, step_dim, **rest), nn.SiLU(), make.Linear(step_dim, step_dim, **rest)
        )

    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        """Float32 `[B, n]` -> float32 `[B, n, E]`. In bfloat16 994.7 would become 996."""
        half = self.freq_dim // 2
        rates = torch.exp(torch.arange(half, device=timestep.device) * (-torch.log(torch.tensor(10000.0)) / half))
        angles = timestep.float()[..., None] * rates
        waves = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return in_float32(self.mlp[2], silu(in_float32(self.mlp[0], waves)))


class Text:
    """The embedded prompt `[B, L, C]` of one forward, and which of its rows each batch entry attends to.

    mask: bool `[B, L]`, or None for all rows.
    """

    def __init__(self, rows: torch.Tensor, mask: torch.Tensor | None, options: dict) -> None:
        self.rows = rows
        self._bias = None
        if mask is not None:
            # Added to logits: not all of the host's attentions take a mask of truth values.
            lowest = torch.finfo(rows.dtype).min
            self._bias = rows.new_zeros(mask.shape).masked_fill_(~mask, lowest)[:, None, None, :]
        self._options = options

    def attended(self, module: LongCatAttention, x: torch.Tensor) -> torch.Tensor:
        """Cross-attention of tokens `[B, S, C]`."""
        q, k, v = (t.flatten(2) for t in module.project(x, self.rows))
        return module.o(
            optimized_attention(q, k, v, heads=module.num_heads, mask=self._bias, transformer_options=self._options)
        )

    def first(self, count: int) -> Text:
        """The prompts of the first `count` batch entries."""
        text = Text(self.rows[:count], None, self._options)
        text._bias = None if self._bias is None else self._bias[:count]
        return text


@dataclass(frozen=True)
class Rehearsal:
    """Noisy frames that show a cache how it will be asked.

    frames: latents `[B, 16, n, H, W]`; at: their positions in the video; timestep: float32 `[1, n]`.
    """

    frames: torch.Tensor
    at: Sequence[int]
    timestep: torch.Tensor
    text: Text


class LongCatModel(nn.Module):
    """Denoises a segment of a video whose first frames may be given.

    Given frames are clean: they look at nothing but each other, so their keys and values are computed once and cached.

    Args:
        attends_padding: whether the rows behind the prompt, set to zero, are attended as well.
    """

    def __init__(
        self,
        image_model=None,
        in_dim: int = 16,
        out_dim: int = 16,
        dim: int = 4096,
        ffn_dim: int = 11008,
        num_heads: int = 32,
        num_layers: int = 48,
        text_dim: int = 4096,
        freq_dim: int = 256,
        step_dim: int = 512,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        attends_padding: bool = True,
        device=None,
        dtype=None,
        operations=None,
    ) -> None:
        super().__init__()
        settings = {"operations": operations, "device": device, "dtype": dtype}
        rest = {"device": device, "dtype": dtype}
        self.dtype = dtype
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.num_layers, self.out_dim, self.patch_size = num_layers, out_dim, patch_size
        self.attends_padding = attends_padding
        patch = patch_size[0] * patch_size[1] * patch_size[2]
        self.patch_embedding = operations.Conv3d(in_dim, dim, kernel_size=patch_size, stride=patch_size, **rest)
        self.time_embedding = StepEmbedding(freq_dim, step_dim, settings)
        self.text_embedding = nn.Sequential(
            operations.Linear(text_dim, dim, **rest), nn.GELU(approximate="tanh"), operations.Linear(dim, dim, **rest)
        )
        self.blocks = nn.ModuleList(
            LongCatBlock(dim, ffn_dim, num_heads, step_dim, settings) for _ in range(num_layers)
        )
        self.head = LongCatHead(dim, patch * out_dim, step_dim, settings)

    def embed_text(self, context: torch.Tensor, options: dict) -> Text:
        """Prompts `[B, L, text width]`; rows behind a prompt are zero, as the host's text encoder leaves them."""
        context = pad(context, (0, 0, 0, max(0, TEXT_TOKENS - context.shape[1])))
        used = (context != 0).any(-1)
        rows = self.text_embedding(context)
        if self.attends_padding:
            return Text(rows * used[..., None], None, options)
        longest = int(used.sum(1).max())
        rows, used = rows[:, :longest], used[:, :longest]
        return Text(rows, None if bool(used.all()) else used, options)

    def predict(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        text: Text,
        cache: GivenCache | None = None,
        options: dict | None = None,
    ) -> torch.Tensor:
        """What the network was trained to say: the clean frames minus the noise.

        Args:
            x: noisy frames `[B, 16, n, H, W]`.
            timestep: float32 `[B]`, 0 to 1000.
            cache: given frames before these; see `cache`. They stand at the positions that follow.
        """
        start = 0 if cache is None else cache.frames
        tokens, grid = self._tokens(x)
        freqs = positions(self.head_dim, (start, *grid), x.device)
        steps = self.time_embedding(timestep[:, None])
        for index, block in enumerate(self.blocks):
            attend = partial(self._attend, freqs, cache, index, options or {})
            tokens = block(tokens, steps, attend, text)
        return self._pictures(self.head(tokens, steps), grid)

    def prefill(
        self,
        given: torch.Tensor,
        cache: GivenCache,
        options: dict | None = None,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        """Store every layer's keys and values of clean frames `[B, 16, n, H, W]` in `cache`.

        rehearsal: noisy frames that ride along and show the cache how it will be asked; seen by nobody, stored nowhere.
        """
        frames = given.shape[2]
        tokens, grid = self._tokens(given)
        clean = tokens.shape[1]
        freqs = positions(self.head_dim, (0, *grid), given.device)
        timestep, text = torch.zeros(given.shape[0], frames, device=given.device), None
        if rehearsal is not None:
            text = rehearsal.text
            noisy, (_, *plane) = self._tokens(rehearsal.frames)
            tokens = torch.cat((tokens, noisy), dim=1)
            late = [positions(self.head_dim, (at, 1, *plane), given.device) for at in rehearsal.at]
            freqs = torch.cat((freqs, *late), dim=1)
            timestep = torch.cat((timestep, rehearsal.timestep.expand(given.shape[0], -1)), dim=1)
        steps = self.time_embedding(timestep)
        cache.begin(frames, freqs[:, :clean])
        for index, block in enumerate(self.blocks):
            tokens = block(tokens, steps, partial(self._store, freqs, clean, cache, index, options or {}), text, clean)

    def forward(self, x, timestep, context, transformer_options={}, given=None, **kwargs) -> torch.Tensor:  # noqa: B006
        """Called by the host: flow from the clean frames to the noise (hence the sign), 0 for the given frames."""
        height, width = x.shape[3:]
        text, cache, count = self.embed_text(context, transformer_options), None, 0
        if given is not None:
            count = given.shape[2]
            cache = run_of(transformer_options).cache_for(self, x[:, :, count:], given, text, transformer_options)
        said = self.predict(x[:, :, count:], timestep, text, cache, transformer_options)
        flow = -said[..., :height, :width]
        return torch.cat((torch.zeros_like(flow[:, :, :1]).expand(-1, -1, count, -1, -1), flow), dim=2)

    def _attend(self, freqs, cache, index: int, options: dict, q, k, v) -> torch.Tensor:
        q, k = apply_rope1(q, freqs), apply_rope1(k, freqs)
        attention = partial(host_attention, options)
        return attention(q, k, v) if cache is None else cache.attend(index, q, k, v, attention)

    def _store(self, freqs, clean: int, cache, index: int, options: dict, q, k, v) -> torch.Tensor:
        plain = k[:, :clean]
        q, k = apply_rope1(q, freqs), apply_rope1(k, freqs)
        out = host_attention(options, q[:, :clean], k[:, :clean], v[:, :clean])
        asking = q[:, clean:]
        if asking.shape[1]:
            out = torch.cat((out, host_attention(options, asking, k, v)), dim=1)
        cache.store(index, plain, v[:, :clean], asking)
        return out

    def _tokens(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Tokens `[B, S, C]` of frames `[B, 16, n, H, W]`, and their grid (frames, rows, columns)."""
        x = comfy.ldm.common_dit.pad_to_patch_size(x, self.patch_size)
        x = self.patch_embedding(x)
        return x.flatten(2).transpose(1, 2), tuple(x.shape[2:])

    def _pictures(self, tokens: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """Inverse of `_tokens`, for the network's output: `[B, 16, n, H, W]`."""
        x = tokens.unflatten(1, grid).unflatten(-1, (*self.patch_size, self.out_dim))
        return x.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def run_of(options: dict) -> LongCatRun:
    """The run that a forward belongs to.

    Raises:
        ValueError: when there is none: the model was not sampled by the host's sampler.
    """
    run = options.get(RUN_KEY)
    if run is None:
        raise ValueError(
            "LongCat-Video keeps the keys and values of given frames for one run of a sampler, and this forward "
            "belongs to none. Sample it with KSampler or Sampler Custom (Advanced)."
        )
    return run


def host_attention(options: dict, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The host's attention on `[B, S, H, D]`; `[B, T, H * D]`."""
    merged = (t.flatten(2) for t in (q, k, v))
    return optimized_attention(*merged, heads=q.shape[2], transformer_options=options)


def in_float32(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A linear layer computed in float32, with the host's casting, offloading and LoRAs."""
    x = x.float()
    weight, bias, stream = comfy.ops.cast_bias_weight(layer, x, offloadable=True)
    out = linear(x, weight, bias)
    comfy.ops.uncast_bias_weight(layer, weight, bias, stream)
    return out


def modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Normed tokens `[B, S, C]`, scaled and shifted by frame (`[B, frames or 1, 1, C]`)."""
    frames = x.unflatten(1, (shift.shape[1], -1))
    normed = layer_norm(frames.float(), frames.shape[-1:], eps=EPS)
    return (normed * (scale + 1) + shift).to(x.dtype).flatten(1, 2)


def gated(x: torch.Tensor, change: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Tokens `[B, S, C]` plus a change that is weighted by frame."""
    change = gate * change.unflatten(1, (gate.shape[1], -1))
    return (x + change.flatten(1, 2)).to(x.dtype)

"""ComfyUI's CausalWanModel as a trainable network: construction, initialisation, teacher-forced forward."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import TeacherForcingAttention, attend
from .pack import conditioning, tiny_world

import comfy.ldm.wan.ar_model  # isort: skip
import comfy.ops  # isort: skip
from comfy.ldm.wan.model import sinusoidal_embedding_1d  # isort: skip

DIM, HEADS, LAYERS, FFN = 256, 2, 6, 1024
HOST_CONFIG = {"transformer": {"causal_ar": True, "text_dim": conditioning.CONTEXT_DIM, "num_heads": HEADS}}
TOKENS_PER_FRAME = (tiny_world.HEIGHT // tiny_world.DOWNSCALE // 2) * (tiny_world.WIDTH // tiny_world.DOWNSCALE // 2)


def build_model(device: torch.device) -> nn.Module:
    """A fresh CausalWanModel in float32. The host's layers come without values, so every one is set here."""
    channels = tiny_world.LATENT_CHANNELS
    model = comfy.ldm.wan.ar_model.CausalWanModel(
        model_type="t2v",
        dim=DIM,
        ffn_dim=FFN,
        num_heads=HEADS,
        num_layers=LAYERS,
        text_dim=conditioning.CONTEXT_DIM,
        in_dim=channels,
        out_dim=channels,
        device=device,
        dtype=torch.float32,
        operations=comfy.ops.disable_weight_init,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _initialise(name, parameter)
    return model.requires_grad_(True)


def _initialise(name: str, parameter: Tensor) -> None:
    if "modulation" in name:
        parameter.normal_(0, 1 / math.sqrt(DIM))
    elif parameter.ndim > 1:
        parameter.normal_(0, 0.002 if "head" in name else 0.02)
    else:
        parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)


class TeacherForcing:
    """Runs a model on [clean clip | noisy copies] sequences; one compiled block serves all layers."""

    def __init__(self, compiled: bool) -> None:
        self._block = torch.compile(block_forward, dynamic=False) if compiled else block_forward

    def velocity(
        self,
        model: nn.Module,
        clean: Tensor,
        noisy: Tensor,
        sigma: Tensor,
        context: Tensor,
        attention: TeacherForcingAttention,
    ) -> Tensor:
        """Flow velocity of every noisy copy.

        clean [B, 16, T, h, w], noisy [B, R, 16, T, h, w], sigma [B, R, T] in [0, 1], context [B, 4, 64];
        returns [B, R, 16, T, h, w] in float32.
        """
        batch, copies, _, frames, height, width = noisy.shape
        clips = torch.cat([clean.unsqueeze(1), noisy], dim=1).flatten(0, 1)
        x = _embed_patches(model.patch_embedding, clips).unflatten(0, (batch, 1 + copies)).flatten(1, 2)
        time = torch.cat([torch.zeros_like(sigma[:, :1]), sigma], dim=1).flatten(1) * 1000
        embedded = self._embed_time(model, time, x.dtype)
        modulation = model.time_projection(embedded).unflatten(2, (6, DIM))
        context = model.text_embedding(context)
        rope = model.rope_encode(frames, height, width, device=x.device, dtype=torch.float32)
        rope = rope.repeat(1, 1 + copies, 1, 1, 1, 1)
        for block in model.blocks:
            x = self._block(block, x, modulation, rope, context, attention.mask)
        generated = x[:, frames:].unflatten(1, (copies, frames)).flatten(2, 3).flatten(0, 1)
        out = model.head(generated, embedded[:, frames:].unflatten(1, (copies, frames)).flatten(0, 1))
        out = model.unpatchify(out, (frames, height // 2, width // 2))
        return out.unflatten(0, (batch, copies)).float()

    @staticmethod
    def _embed_time(model: nn.Module, time: Tensor, dtype: torch.dtype) -> Tensor:
        features = sinusoidal_embedding_1d(model.freq_dim, time.flatten()).to(dtype)
        return model.time_embedding(features).unflatten(0, time.shape)


def block_forward(block: nn.Module, x: Tensor, modulation: Tensor, rope: Tensor, context: Tensor, mask) -> Tensor:
    """One transformer block, equal to the host's but for the mask; x is [B, frames, tokens, C]."""
    parts = (block.modulation.unsqueeze(0) + modulation).unsqueeze(3).unbind(2)
    shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = parts
    x = x + gate_a * _self_attention(block.self_attn, shift_a + block.norm1(x) * (1 + scale_a), rope, mask)
    x = x + _cross_attention(block.cross_attn, block.norm3(x), context)
    return x + gate_f * block.ffn(shift_f + block.norm2(x) * (1 + scale_f))


def _self_attention(layer: nn.Module, x: Tensor, rope: Tensor, mask) -> Tensor:
    frames = x.shape[1]
    x = x.flatten(1, 2)
    value = _heads(layer.v(x))
    query, key = (
        rotate(norm(project(x)).unflatten(2, (HEADS, -1)), rope).to(value.dtype).transpose(1, 2)
        for norm, project in ((layer.norm_q, layer.q), (layer.norm_k, layer.k))
    )
    out = attend(query, key, value, mask).transpose(1, 2).flatten(2)
    return layer.o(out).unflatten(1, (frames, -1))


def _cross_attention(layer: nn.Module, x: Tensor, context: Tensor) -> Tensor:
    # Frames become batch: attention's backward is parallel over the batch, not over queries, and there are
    # only four keys.
    batch, frames = x.shape[:2]
    value = _heads(layer.v(context).repeat_interleave(frames, 0))
    query = _heads(layer.norm_q(layer.q(x.flatten(0, 1)))).to(value.dtype)
    key = _heads(layer.norm_k(layer.k(context)).repeat_interleave(frames, 0)).to(value.dtype)
    out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    return layer.o(out).unflatten(0, (batch, frames))


def _embed_patches(layer: nn.Module, clips: Tensor) -> Tensor:
    """The host's patch embedding as a matrix product: [N, 16, T, h, w] to [N, T, tokens, C].

    A 3-D convolution with such a kernel is slow to train.
    """
    patches = clips.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).permute(0, 2, 3, 5, 1, 4, 6)
    return F.linear(patches.flatten(4).flatten(2, 3), layer.weight.flatten(1), layer.bias)


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(2, (HEADS, -1)).transpose(1, 2)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary position embedding in the host's layout, neighbouring channels as pairs."""
    pairs = x.float().unflatten(-1, (-1, 1, 2))
    return (rope[..., 0] * pairs[..., 0] + rope[..., 1] * pairs[..., 1]).flatten(-2)

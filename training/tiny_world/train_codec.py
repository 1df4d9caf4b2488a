"""Trains the picture codec: mean squared error, with a little noise on the latent so that it is forgiving."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .pack import codec as codec_module
from .pack import render
from .plan import Budget, Plan

_LATENT_NOISE = 0.05
_LATENT_PULL = 1e-3
_PEAK_RATE = 1.5e-3

log = logging.getLogger(__name__)


def train_codec(plan: Plan, device: torch.device) -> codec_module.TinyWorldCodec:
    """A codec trained on single frames of fresh rooms, its latents of zero mean and unit variance."""
    codec = _new_codec(codec_module.CodecConfig(plan.codec_width, plan.codec_residuals), device)
    generator = torch.Generator().manual_seed(1)
    _optimize(codec, plan, plan.codec_seconds, lambda: _loss(codec, _batch(plan, generator, device)))
    _normalise_latents(codec, generator, device)
    log.info("codec: %.2f dB", codec_psnr(codec, device))
    return codec


def slim_codec(wide: codec_module.TinyWorldCodec, plan: Plan, device: torch.device) -> codec_module.TinyWorldCodec:
    """A small codec for the latents of a large one, so that decoding on a CPU takes no longer than sampling."""
    codec = _new_codec(codec_module.CodecConfig(plan.slim_width, plan.slim_residuals), device)
    generator = torch.Generator().manual_seed(6)
    _optimize(codec, plan, plan.slim_seconds, lambda: _slim_loss(codec, wide, _batch(plan, generator, device)))
    log.info("slim codec: %.2f dB", codec_psnr(codec, device))
    return codec


def _new_codec(config: codec_module.CodecConfig, device: torch.device) -> codec_module.TinyWorldCodec:
    codec = codec_module.TinyWorldCodec(config).to(device, memory_format=torch.channels_last)
    return codec.requires_grad_(True).apply(_initialise)


def _optimize(codec: codec_module.TinyWorldCodec, plan: Plan, seconds: float, loss_of_batch: Callable) -> None:
    """AdamW for a number of seconds; the codec is frozen afterwards."""
    optimizer = torch.optim.AdamW(codec.parameters(), _PEAK_RATE, betas=(0.9, 0.98), fused=_on_gpu(codec))
    budget, step = Budget(seconds), 0
    while not budget.spent():
        for group in optimizer.param_groups:
            group["lr"] = budget.learning_rate(_PEAK_RATE, step, warmup=200, hold=0.3)
        loss = loss_of_batch()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(codec.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % (4 * plan.log_every) == 0:
            log.info("codec step %d, %.0f %%, loss %.5f", step, 100 * budget.progress, loss.item())
    log.info("codec: %d steps", step)
    codec.eval().requires_grad_(False)


def _on_gpu(codec: codec_module.TinyWorldCodec) -> bool:
    return codec.latent_mean.device.type == "cuda"


def _batch(plan: Plan, generator: torch.Generator, device: torch.device) -> Tensor:
    return random_frames(plan.codec_batch, generator, device)


def random_frames(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Frames of `count` different rooms, [count, 3, H, W] in [-1, 1]."""
    rooms, motion = render.random_rooms(count, generator), render.random_motion(count, generator)
    frames = render.render_clips(rooms.to(device), motion.to(device), 1)[:, 0]
    return (frames * 2 - 1).contiguous(memory_format=torch.channels_last)


def codec_psnr(codec: codec_module.TinyWorldCodec, device: torch.device, count: int = 64) -> float:
    """Reconstruction of rooms that no training step has seen, in dB over the [0, 1] range."""
    frames = random_frames(count, torch.Generator().manual_seed(10**6), device)
    with torch.no_grad():
        error = F.mse_loss(codec.decode_frames(codec.encode_frames(frames)).clamp(-1, 1), frames)
    return 10 * math.log10(4 / error.item())


def _initialise(module: nn.Module) -> None:
    """torch's own default for convolutions; the host's layers come without values."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        bound = 1 / math.sqrt(module.weight[0].numel())
        nn.init.uniform_(module.bias, -bound, bound)


def _loss(codec: codec_module.TinyWorldCodec, frames: Tensor) -> Tensor:
    with torch.autocast(frames.device.type, torch.bfloat16, enabled=frames.device.type == "cuda"):
        latent = codec.encoder(frames)
        decoded = codec.decoder(latent + _LATENT_NOISE * torch.randn_like(latent)).float()
    pull = latent.float().square().mean()
    return F.mse_loss(decoded, frames) + 0.1 * F.l1_loss(decoded, frames) + _LATENT_PULL * pull


def _slim_loss(codec: codec_module.TinyWorldCodec, wide: codec_module.TinyWorldCodec, frames: Tensor) -> Tensor:
    """Same latents as the wide codec, same pictures from them; half of the decoder's batch is the wide one's."""
    with torch.autocast(frames.device.type, torch.bfloat16, enabled=_on_gpu(codec)):
        with torch.no_grad():
            wanted = wide.encode_frames(frames).float()
        latent = codec.encode_frames(frames).float()
        half = len(frames) // 2
        mixed = torch.cat([latent[:half], wanted[half:]])
        decoded = codec.decode_frames(mixed + _LATENT_NOISE * torch.randn_like(mixed)).float()
    return F.mse_loss(decoded, frames) + 0.1 * F.mse_loss(latent, wanted)


@torch.no_grad()
def _normalise_latents(codec: codec_module.TinyWorldCodec, generator: torch.Generator, device: torch.device) -> None:
    latent = codec.encoder(random_frames(128, generator, device))
    codec.latent_mean.copy_(latent.mean((0, 2, 3)).view(-1, 1, 1))
    codec.latent_std.copy_(latent.std((0, 2, 3)).view(-1, 1, 1))

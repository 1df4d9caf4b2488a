"""The main stage: flow matching with teacher forcing on endless fresh clips."""

from __future__ import annotations

import copy
import logging
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import ranks
from .attention import TeacherForcingAttention, random_partition
from .network import TOKENS_PER_FRAME, TeacherForcing
from .pack import codec as codec_module
from .pack import conditioning, render
from .plan import Budget, Plan, sigma_of

_PEAK_RATE = 8e-4
_CONTEXT_NOISE = 0.08  # upper end; the model will see its own slightly wrong frames in the cache

log = logging.getLogger(__name__)


class Clips:
    """Endless clips of new worlds as normalised latents."""

    def __init__(self, codec: codec_module.TinyWorldCodec, plan: Plan, device: torch.device, compiled: bool) -> None:
        self.codec = codec
        self.plan = plan
        self.device = device
        self.generator = torch.Generator().manual_seed(2 + 1000 * ranks.rank())
        self._render = torch.compile(render.render_clips, dynamic=False) if compiled else render.render_clips

    @torch.no_grad()
    def batch(self) -> tuple[Tensor, Tensor]:
        """Latents [B, 16, T, h, w] and context [B, 4, 64]."""
        count, frames = self.plan.clips, self.plan.frames
        rooms = render.random_rooms(count, self.generator).to(self.device)
        motion = training_motion(count, self.generator).to(self.device)
        pictures = self._render(rooms, motion, frames).flatten(0, 1) * 2 - 1
        with autocast(self.device):
            latents = self.codec.encode_frames(pictures.contiguous(memory_format=torch.channels_last))
        latents = latents.float().contiguous().unflatten(0, (count, frames)).transpose(1, 2)
        return latents.contiguous(), conditioning.context_tokens(motion)


class Average:
    """Exponential moving average of a model's weights."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay
        self.steps = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.steps += 1
        decay = min(self.decay, self.steps / (self.steps + 10))
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - decay)


def training_motion(count: int, generator: torch.Generator) -> render.Motion:
    """Random motions, half of them such that a view comes back exactly, after a whole number of frames."""
    motion = render.random_motion(count, generator)
    whole = 360 / (360 / motion.turn_rate).round()
    slow, fast = render.TURN_RATE_RANGE
    usable = (whole.abs() >= slow) & (whole.abs() <= fast) & (torch.rand(count, generator=generator) < 0.5)
    return render.Motion(torch.where(usable, whole, motion.turn_rate), motion.orbit, motion.phase)


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU, nothing on the CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def make_optimizer(model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """AdamW as both stages use it."""
    return torch.optim.AdamW(
        model.parameters(), _PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda"
    )


def apply_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    """One optimizer step at learning rate `rate`, gradients clipped to unit norm."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    ranks.average_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def noisy_context(latents: Tensor) -> Tensor:
    """The clean half with a random amount of noise per clip."""
    amount = _CONTEXT_NOISE * torch.rand(len(latents), 1, 1, 1, 1, device=latents.device)
    return latents + amount * torch.randn_like(latents)


def per_block(values: Tensor, attention: TeacherForcingAttention) -> Tensor:
    """Values [B, R, T] made equal within each block of the current partition."""
    index = attention.block_of_frame.view(1, 1, -1).expand(*values.shape)
    return values.gather(2, index)


def weighted(error: Tensor, attention: TeacherForcingAttention) -> Tensor:
    """Mean of an error [B, R, 16, T, h, w] over the frames that the model has to generate."""
    per_frame = error.mean((0, 1, 2, 4, 5))
    return (per_frame * attention.weight).sum() / attention.weight.sum().clamp_min(1)


def train_world(
    model: nn.Module, plan: Plan, clips: Clips, forcing: TeacherForcing, attention: TeacherForcingAttention, save
) -> nn.Module:
    """`model`, averaged, after the main stage. `save(model, steps)` is called on the way and at the end."""
    ranks.same_weights(model)
    optimizer, average = make_optimizer(model, clips.device), Average(model, 0.999)
    rng = random.Random(3 + ranks.rank())
    budget, step, saved = Budget(plan.world_seconds), 0, 0.0
    while not budget.spent():
        attention.select(rng.randrange(plan.partitions))
        loss = _loss(model, clips, forcing, attention)
        rate = budget.learning_rate(_PEAK_RATE, step, warmup=200, hold=0.5)
        apply_gradients(model, optimizer, loss, rate)
        average.update(model)
        step += 1
        if step % plan.log_every == 0 or step in (1, 3, 20):
            log.info("world step %d, %.0f %%, loss %.4f", step, 100 * budget.progress, loss.item())
        if budget.progress - saved > 0.34:
            saved = budget.progress
            save(average.model, step)
    save(average.model, step)
    return average.model


def _loss(model: nn.Module, clips: Clips, forcing: TeacherForcing, attention: TeacherForcingAttention) -> Tensor:
    latents, context = clips.batch()
    sigma = per_block(_stratified_sigma(len(latents), clips.plan, clips.device), attention)
    noise = torch.randn(len(latents), clips.plan.copies, *latents.shape[1:], device=clips.device)
    level = sigma[:, :, None, :, None, None]
    noisy = torch.lerp(latents.unsqueeze(1), noise, level)
    with autocast(clips.device):
        velocity = forcing.velocity(model, noisy_context(latents), noisy, sigma, context, attention)
    return weighted(F.mse_loss(velocity, noise - latents.unsqueeze(1), reduction="none"), attention)


def _stratified_sigma(batch: int, plan: Plan, device: torch.device) -> Tensor:
    """Noise levels [B, R, T]; the copies of a block fall into different parts of the range."""
    part = torch.arange(plan.copies, device=device).view(1, -1, 1)
    return sigma_of((part + torch.rand(batch, plan.copies, plan.frames, device=device)) / plan.copies)


def make_attention(plan: Plan, copies: int, device: torch.device) -> TeacherForcingAttention:
    """Attention over `copies` noisy copies; partitions come in the same order for every number of copies."""
    rng = random.Random(4)
    partitions = [random_partition(plan.frames, rng) for _ in range(plan.partitions)]
    flex = device.type == "cuda"
    return TeacherForcingAttention(partitions, copies, TOKENS_PER_FRAME, device, flex)

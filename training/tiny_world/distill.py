"""Distillation to the four steps of ComfyUI's autoregressive sampler.

With four steps, a flow-matching model paints the average of all walls that might be there. The student learns
where the teacher's probability-flow path ends instead: one wall, sharp. The sampler adds fresh noise after
every step, so the student is also trained from states that its own earlier steps lead to, with the teacher
solving the path from there.
"""

from __future__ import annotations

import copy
import logging
import random

import torch
from torch import Tensor, nn

from .attention import TeacherForcingAttention
from .network import TeacherForcing
from .plan import STUDENT_TIMES, Budget, Plan, sigma_of
from .train_world import Average, Clips, apply_gradients, autocast, make_optimizer, noisy_context, weighted

_PEAK_RATE = 4e-4
_TEACHER_TIMES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.14, 0.06, 0.0)
_START_WEIGHTS = (0.4, 0.15, 0.15, 0.3)  # how often a path starts at each of the student's steps
_HUBER = 0.1

log = logging.getLogger(__name__)


class Distillation:
    """Teacher, student and what both are run on."""

    def __init__(
        self,
        teacher: nn.Module,
        clips: Clips,
        forcing: TeacherForcing,
        single: TeacherForcingAttention,
        several: TeacherForcingAttention,
    ) -> None:
        # Both want gradients, though only the student gets any: compiled code is not shared otherwise.
        self.teacher = teacher.requires_grad_(True)
        self.student = copy.deepcopy(teacher)
        self.clips = clips
        self.forcing = forcing
        self.single = single
        self.several = several
        self.levels = [sigma_of(time) for time in STUDENT_TIMES]

    def loss(self, start: int, partition: int) -> Tensor:
        """Student error against the ends of the teacher's paths that start at the student's step `start`."""
        self.single.select(partition)
        self.several.select(partition)
        latents, context = self.clips.batch()
        clean = noisy_context(latents)
        with torch.no_grad():
            state = self._student_chain(clean, context, start)
            states, end = self._teacher_path(clean, context, state, start)
        chosen = [start + i % (len(self.levels) - start) for i in range(self.clips.plan.copies)]
        noisy = torch.stack([states[step] for step in chosen], dim=1)
        level = noisy.new_tensor([self.levels[step] for step in chosen]).view(1, -1, 1)
        sigma = level.expand(len(noisy), -1, noisy.shape[3])
        with autocast(noisy.device):
            velocity = self.forcing.velocity(self.student, clean, noisy, sigma, context, self.several)
        error = velocity - (noisy - end.unsqueeze(1)) / level[..., None, None, None]
        return weighted((error.square() + _HUBER**2).sqrt() - _HUBER, self.several)

    def _student_chain(self, clean: Tensor, context: Tensor, steps: int) -> Tensor:
        """The noisy state that the student's first `steps` sampler steps lead to."""
        state = torch.randn_like(clean)
        for level, following in zip(self.levels[:steps], self.levels[1:]):
            denoised = state - level * self._velocity(self.student, clean, context, state, level)
            state = torch.lerp(denoised, torch.randn_like(clean), following)
        return state

    def _teacher_path(
        self, clean: Tensor, context: Tensor, state: Tensor, start: int
    ) -> tuple[dict[int, Tensor], Tensor]:
        """The teacher's path from `state` to sigma 0: the states at the student's steps, and the end.

        Two-step Adams-Bashforth: second order at one evaluation a step.
        """
        times = [time for time in _TEACHER_TIMES if time <= STUDENT_TIMES[start]]
        states: dict[int, Tensor] = {}
        previous: tuple[Tensor, float] | None = None
        for time, following in zip(times, times[1:]):
            if time in STUDENT_TIMES:
                states[STUDENT_TIMES.index(time)] = state
            level, width = sigma_of(time), sigma_of(following) - sigma_of(time)
            velocity = self._velocity(self.teacher, clean, context, state, level)
            slope = velocity
            if previous is not None and following > 0:
                slope = velocity + width / (2 * previous[1]) * (velocity - previous[0])
            state = state + width * slope
            previous = velocity, width
        return states, state

    def _velocity(self, model: nn.Module, clean: Tensor, context: Tensor, state: Tensor, level: float) -> Tensor:
        sigma = state.new_full((len(state), 1, state.shape[2]), level)
        with autocast(state.device):
            return self.forcing.velocity(model, clean, state.unsqueeze(1), sigma, context, self.single).squeeze(1)


def distill(plan: Plan, distillation: Distillation, save) -> nn.Module:
    """The averaged four-step student. `save(model, steps)` is called half-way and at the end."""
    student = distillation.student
    optimizer, average = make_optimizer(student, distillation.clips.device), Average(student, 0.99)
    rng = random.Random(5)
    budget, step, saved = Budget(plan.distill_seconds), 0, 0.0
    while not budget.spent():
        # Every process takes the same start: some take four times as long as others.
        start = rng.choices(range(len(STUDENT_TIMES)), _START_WEIGHTS)[0]
        loss = distillation.loss(start, rng.randrange(plan.partitions))
        rate = budget.learning_rate(_PEAK_RATE, step, warmup=20, hold=0.3)
        apply_gradients(student, optimizer, loss, rate)
        average.update(student)
        step += 1
        if step % max(1, plan.log_every // 5) == 0 or step == 1:
            log.info("distill step %d, %.0f %%, loss %.4f", step, 100 * budget.progress, loss.item())
        if budget.progress - saved > 0.5:
            saved = budget.progress
            save(average.model, step)
    save(average.model, step)
    return average.model

"""The whole training in order, and the report on its results."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch

from . import evaluate, kv_dump, ranks
from .distill import Distillation, distill
from .export import add_facts, load_world, save_codec, save_world
from .network import TeacherForcing, build_model
from .pack import codec as codec_module
from .plan import Plan
from .rollout import Rollout, make_worlds
from .train_codec import slim_codec, train_codec
from .train_world import Clips, make_attention, train_world

WORLD, TEACHER = "world.safetensors", "world_teacher.safetensors"
CODEC, WIDE_CODEC = "codec.safetensors", "codec_wide.safetensors"

log = logging.getLogger(__name__)


def train_codecs(plan: Plan, out: Path, device: torch.device, start: Path | None) -> None:
    """The wide codec, whose latents the world is made of, and the slim one that ships."""
    if start is None:
        wide = train_codec(plan, device)
        save_codec(wide, out / WIDE_CODEC)
    else:
        shutil.copyfile(start / WIDE_CODEC, out / WIDE_CODEC)
        wide = codec_module.load_codec(start / WIDE_CODEC).to(device).requires_grad_(False)
    save_codec(slim_codec(wide, plan, device), out / CODEC)


def train_worlds(plan: Plan, out: Path, device: torch.device, start: Path | None, compiled: bool) -> None:
    """Teacher and student; each is on disk as soon as there is anything worth keeping."""
    folder = out if start is None else start
    clips = Clips(codec_module.load_codec(folder / WIDE_CODEC).to(device), plan, device, compiled)
    forcing = TeacherForcing(compiled)
    several = make_attention(plan, plan.copies, device)
    model = build_model(device)
    if start is not None:
        load_world(model, start / TEACHER)

    def save_teacher(model: torch.nn.Module, steps: int) -> None:
        if ranks.rank() == 0:
            save_world(model, out / TEACHER, stage="flow matching", steps=steps)

    teacher = train_world(model, plan, clips, forcing, several, save_teacher)
    distillation = Distillation(teacher, clips, forcing, make_attention(plan, 1, device), several)

    def save_student(model: torch.nn.Module, steps: int) -> None:
        if ranks.rank() == 0:
            save_world(model, out / WORLD, stage="distilled to 4 steps", steps=steps)

    distill(plan, distillation, save_student)


def report(plan: Plan, out: Path, compare: Path | None) -> str:
    """A table of every weight file's worth; the numbers also go into the files."""
    lines = [evaluate.HEADER]
    if compare is not None:
        lines.append(evaluate.measure(plan, compare / WORLD, compare / CODEC).row("compared"))
    teacher = evaluate.measure(plan, out / TEACHER, out / CODEC)
    student = evaluate.measure(plan, out / WORLD, out / CODEC, preview=out / "preview.png")
    lines += [teacher.row("teacher"), student.row("student")]
    lines += [_with_block(plan, out, block).row(f"  block {block}") for block in (1, 2)]
    add_facts(out / TEACHER, **teacher.facts())
    add_facts(out / WORLD, **student.facts())
    add_facts(out / CODEC, codec_db=f"{student.codec_db:.2f}")
    return "\n".join(lines)


def _with_block(plan: Plan, out: Path, block: int) -> evaluate.Measures:
    """The student sampled with other blocks than those it is meant for."""
    return evaluate.measure(plan, out / WORLD, out / CODEC, block=block)


def dump_cache(plan: Plan, out: Path) -> None:
    """Queries, keys and values of one world's rollout, a full turn given."""
    worlds = make_worlds(1, plan.eval_frames, seed=10**6 + 2, slowest=18.0)
    kv_dump.dump(Rollout(out / WORLD, out / CODEC), worlds, plan.long_seed, out)

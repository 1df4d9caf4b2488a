"""Training on several GPUs at once: one process each, started by torchrun, gradients averaged.

With a single process every function here does nothing.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn


def start() -> torch.device:
    """Join the other processes, if there are any, and return the device of this one."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank()) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if world_size() > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    return device


def rank() -> int:
    """Number of this process; process 0 does what must be done once."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", 1))


def stop() -> None:
    """Leave the other processes."""
    if world_size() > 1:
        dist.destroy_process_group()


def agree(number: float) -> float:
    """The number that process 0 has; every process must call this at the same points."""
    if world_size() == 1:
        return number
    value = torch.tensor([number], dtype=torch.float64)
    dist.broadcast(value, 0)
    return value.item()


def same_weights(model: nn.Module) -> None:
    """Give every process the weights of process 0."""
    if world_size() > 1:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient by its mean over the processes, in one exchange."""
    if world_size() == 1:
        return
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= world_size()
    pieces = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [piece.view_as(g) for piece, g in zip(pieces, gradients)])

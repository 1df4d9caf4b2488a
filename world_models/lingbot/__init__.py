"""LingBot-World: image to world with a camera, block by block. The host has no such model, so it is here."""

from __future__ import annotations

from .camera import FRAMES_PER_LATENT, CameraPath, LatentCamera, latent_camera
from .checkpoint import check_weights, is_lingbot
from .model import CAMERA_KEY, SOLVER_KEY, WINDOW_KEY, build, camera_of, solver_of, window_of
from .releases import RELEASES, Release, size_for
from .schedule import few_step_sigmas, path_sigmas
from .window import AttentionWindow

__all__ = [
    "CAMERA_KEY",
    "FRAMES_PER_LATENT",
    "RELEASES",
    "SOLVER_KEY",
    "WINDOW_KEY",
    "AttentionWindow",
    "CameraPath",
    "LatentCamera",
    "Release",
    "build",
    "camera_of",
    "check_weights",
    "few_step_sigmas",
    "is_lingbot",
    "latent_camera",
    "path_sigmas",
    "size_for",
    "solver_of",
    "window_of",
]

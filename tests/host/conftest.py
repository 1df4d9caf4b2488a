"""A server without Triton, and the latents that a prompt saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from safetensors.torch import load

from benchmarks.host import ROOT
from support.prompts import LATENT_NODE
from support.server import ComfyServer, comfy_server

# Python imports this at start-up; the path finder then has no triton, as on a machine without the package.
NO_TRITON = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec


def without_triton(name, path=None, target=None):
    return None if name.partition(".")[0] == "triton" else find_spec(name, path, target)


PathFinder.find_spec = without_triton
"""


@pytest.fixture(scope="session")
def server_without_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A real server on whose machine Triton is not installed."""
    folder = tmp_path_factory.mktemp("no_triton")
    (folder / "sitecustomize.py").write_text(NO_TRITON)
    log_path = ROOT / "out" / "test-server-without-triton.log"
    with comfy_server(log_path=log_path, env={"PYTHONPATH": str(folder)}) as running:
        yield running


def saved_latent(server: ComfyServer, entry: dict) -> torch.Tensor:
    """The latent that a run saved, from its history entry."""
    (reference,) = entry["outputs"][LATENT_NODE]["latents"]
    return load(server.file(reference))["latent_tensor"]


@pytest.fixture(scope="session")
def sample() -> Callable[[ComfyServer, dict], torch.Tensor]:
    """Run a prompt on a server and return its latent."""
    return lambda server, prompt: saved_latent(server, server.run(prompt))

"""Kernel tests run interpreted on the CPU (TRITON_INTERPRET=1, set by scripts/test) or compiled on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.bare_pack import bare_module
from support.kernels import INTERPRETED

pytest.importorskip("triton", reason="Triton is optional")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run here."""
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs TRITON_INTERPRET=1 or a CUDA device")
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(scope="session")
def pack() -> SimpleNamespace:
    """The modules under test, in a package without ComfyUI."""
    bare_module("kernels")
    names = ("backends", "operations", "layer_cache", "methods", "rotation", "settings", "span")
    core = {name: bare_module(f"quantwm_core.{name}") for name in names}
    kernels = {name: bare_module(f"kernels.{name}") for name in ("attention", "decode", "reading", "tables")}
    return SimpleNamespace(**core, **kernels)


def turns(first: int, tokens: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE's cosines and sines of tokens from `first` on, `[tokens, head_dim / 2]`."""
    speed = 100.0 ** -(torch.arange(head_dim // 2) * 2 / head_dim)
    angles = (torch.arange(first, first + tokens).unsqueeze(1) * speed).to(device)
    return angles.cos(), angles.sin()


@pytest.fixture
def make_layer(pack, device):
    """A cache with packed blocks of random tokens: make_layer(tokens of each block, settings...).

    rotated: keys are stored before RoPE.
    """

    def make(blocks, heads=2, head_dim=64, batch=1, dtype=torch.float32, keys=None, rotated=False, **settings):
        chosen = pack.settings.CacheSettings(**settings)
        metric = torch.eye(head_dim, device=device).expand(heads, head_dim, head_dim)
        layer = pack.layer_cache.LayerCache(chosen, pack.methods.build_method(chosen), lambda: metric, device)
        generator = torch.Generator().manual_seed(0)
        for tokens in blocks:
            q, k, v = torch.randn(3, batch, tokens, heads, head_dim, generator=generator).to(device, dtype)
            with pack.backends.only_eager("encode_span", "second_moment"):
                rotation = pack.rotation.Rotation(*turns(layer.end, tokens, head_dim, device)) if rotated else None
                layer.append(k if keys is None else keys(k), v, q, rotation=rotation)
                layer.commit()
        return layer

    return make

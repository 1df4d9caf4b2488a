"""Small random causal Wan models and runs of the host's own sampler, for tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SIGMAS = (1.0, 0.75, 0.5, 0.0)
TOKENS_PER_FRAME = 12  # latents of 6 x 8, patches of 2 x 2


def state_dict(dim: int, layers: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights x 0.05 of a causal Wan with two heads and text width 24, in the host's key layout."""
    import comfy.ldm.wan.ar_model
    import comfy.ops

    network = comfy.ldm.wan.ar_model.CausalWanModel(
        model_type="t2v",
        dim=dim,
        ffn_dim=2 * dim,
        num_heads=2,
        num_layers=layers,
        text_dim=24,
        freq_dim=256,
        device="cpu",
        dtype=torch.float32,
        operations=comfy.ops.disable_weight_init,
    )
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, value in network.state_dict().items():
        noise = torch.randn(value.shape, generator=generator) * 0.05
        weights[name] = noise + 1 if "norm" in name and name.endswith("weight") else noise
    return weights


def load_model(dim: int = 256, weight_dtype: torch.dtype | None = None, layers: int = 2):
    """MODEL from random weights through the host's loader; its causal marker and head count are in the metadata."""
    import comfy.sd

    config = {"transformer": {"causal_ar": True, "num_heads": 2, "text_dim": 24}}
    options = {} if weight_dtype is None else {"dtype": weight_dtype}
    return comfy.sd.load_diffusion_model_state_dict(
        state_dict(dim, layers), model_options=options, metadata={"config": json.dumps(config)}
    )


def with_first_frames(model, frames: int, batch: int = 1):
    """A clone that continues given latent frames, as the host's ARVideoI2V sets it up."""
    clone = model.clone()
    latent = torch.randn(batch, 16, frames, 6, 8, generator=torch.Generator().manual_seed(5))
    clone.model_options.setdefault("transformer_options", {})["ar_config"] = {"initial_latent": latent}
    return clone


def prompt(seed: int) -> torch.Tensor:
    """A text embedding as the guider gets it."""
    return torch.randn(1, 8, 24, generator=torch.Generator().manual_seed(seed))


def run(
    model,
    frames: int = 5,
    block: int = 3,
    seed: int = 0,
    batch: int = 1,
    cfg: float = 1.0,
    callback: Callable | None = None,
    sampler=None,
) -> torch.Tensor:
    """Latent of one run through CFGGuider and the host's ar_video sampler, or another."""
    import comfy.samplers

    context = prompt(1)
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds([[context, {}]], [[-context, {}]])
    guider.set_cfg(cfg)
    noise = torch.randn(batch, 16, frames, 6, 8, generator=torch.Generator().manual_seed(seed))
    sampler = sampler or comfy.samplers.ksampler("ar_video", {"num_frame_per_block": block})
    with torch.inference_mode():
        return guider.sample(
            noise,
            torch.zeros_like(noise),
            sampler,
            torch.tensor(SIGMAS),
            callback=callback,
            disable_pbar=True,
            seed=seed,
        )


class TensorWatch(TorchDispatchMode):
    """Records shape, dtype and bytes of every tensor that an operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], torch.dtype, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self.seen.append((tuple(value.shape), value.dtype, value.untyped_storage().nbytes()))
        return result


@contextmanager
def watched():
    with TensorWatch() as watch:
        yield watch

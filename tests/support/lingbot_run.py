"""The small LingBot-World of `lingbot_case` in the real host: loaded and sampled as a graph would do it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable

import numpy as np
import torch

from support import lingbot_case as case


def _lingbot():
    return importlib.import_module("quantwm_pack.world_models.lingbot")


def load_model(dtype: torch.dtype | None = None, act: bool = False):
    """MODEL through the pack's loader, from the random weights of the case; `act` for the variant that takes keys."""
    import comfy.ops

    network = importlib.import_module("quantwm_pack.world_models.lingbot.network")
    operations = comfy.ops.disable_weight_init
    kind = {"camera_channels": 7} if act else {}
    made = network.LingBotModel(**case.MODEL, **kind, dtype=torch.float32, device="meta", operations=operations)
    weights = case.weights({name: value.shape for name, value in made.state_dict().items()})
    sizes = {"causal_ar": True, "num_heads": case.HEADS, "text_dim": case.TEXT_WIDTH, "freq_dim": 256}
    return _lingbot().build(weights, {"config": json.dumps({"transformer": sizes})}, {"dtype": dtype} if dtype else {})


def camera_path(version: case.Version, act: bool = False):
    poses, keys = case.poses(version.poses).astype(np.float64), case.keys(version.poses) if act else None
    return _lingbot().CameraPath(poses, tuple(map(float, case.intrinsics(version.poses)[0])), keys)


def run(
    model,
    version: case.Version,
    seed: int = case.RUN_SEED,
    cfg: float | None = None,
    sampler=None,
    callback: Callable | None = None,
    **changes,
) -> torch.Tensor:
    """Latents of a run through the host's guider and sampler, in the network's normalisation `[16, T, H, W]`.

    `changes` replaces what both conditionings carry; `cfg` is the version's where it is None.
    """
    import comfy.samplers

    lingbot, frames = _lingbot(), version.frames
    settings = {
        "concat_latent_image": model.model.process_latent_out(case.picture(frames)),
        "concat_mask": 1 - case.mask(frames)[:, :1],
        lingbot.CAMERA_KEY: lingbot.latent_camera(camera_path(version), version.poses, frames),
        lingbot.WINDOW_KEY: lingbot.AttentionWindow(version.window, version.sink) if version.window else None,
    } | changes
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds([[case.text(), settings]], [[case.negative_text(), settings]])
    guider.set_cfg(version.cfg if cfg is None else cfg)
    sigmas = lingbot.path_sigmas(version.steps) if version.steps else lingbot.few_step_sigmas(version.indices)
    sampler = sampler or comfy.samplers.ksampler("ar_video", {"num_frame_per_block": version.block})
    with torch.inference_mode():
        out = guider.sample(
            case.noise(frames),
            torch.zeros(1, 16, frames, case.HEIGHT, case.WIDTH),
            sampler,
            torch.tensor(sigmas),
            disable_pbar=True,
            callback=callback,
            seed=seed,
        )
    return model.model.process_latent_in(out)[0]

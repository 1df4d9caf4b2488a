"""LingBot-World as a ComfyUI model: its conditioning, its noise levels, and the loading of its weights."""

from __future__ import annotations

from typing import Any

import comfy.conds
import comfy.model_base
import comfy.model_detection
import comfy.supported_models
import comfy.utils
import torch
from comfy.model_sampling import CONST, ModelSamplingDiscreteFlow

from ..assembling import assembled
from .camera import LatentCamera
from .checkpoint import camera_channels
from .network import LingBotModel
from .schedule import LEVELS, SHIFT, denoise_levels
from .window import AttentionWindow

CAMERA_KEY = "quantwm_camera"
WINDOW_KEY = "quantwm_window"
SOLVER_KEY = "quantwm_solver"


class LingBotSampling(ModelSamplingDiscreteFlow, CONST):
    """Flow matching at whole timesteps: the network is told a cut timestep, and a prediction is undone at its level."""

    def set_parameters(self, shift=1.0, timesteps=LEVELS, multiplier=LEVELS) -> None:
        super().set_parameters(shift=shift, timesteps=timesteps, multiplier=multiplier)
        self.register_buffer("denoise_levels", torch.from_numpy(denoise_levels(shift)), persistent=False)

    def timestep(self, sigma: torch.Tensor) -> torch.Tensor:
        return (sigma * self.multiplier).floor().clamp(max=LEVELS - 1)

    def prediction_level(self, sigma: torch.Tensor) -> torch.Tensor:
        """The level by which a prediction is undone: one of those that share a timestep stands for all."""
        level = self.denoise_levels.to(sigma)[self.timestep(sigma).long()]
        return torch.where(level.isnan(), sigma, level)

    def calculate_denoised(self, sigma, model_output, model_input) -> torch.Tensor:
        return super().calculate_denoised(self.prediction_level(sigma), model_output, model_input)

    def noise_scaling(self, sigma, noise, latent_image, max_denoise=False) -> torch.Tensor:
        """A run begins with noise alone, also at the highest level of training, which is a little below 1."""
        if float(sigma) >= float(self.denoise_levels[-1]):
            return noise
        return super().noise_scaling(sigma, noise, latent_image, max_denoise)


class LingBotWorld(comfy.model_base.WAN21):
    """The base model: what of a conditioning reaches the network."""

    def __init__(self, model_config, device=None):
        # The class between would fix the network.
        super(comfy.model_base.WAN21, self).__init__(
            model_config, comfy.model_base.ModelType.FLOW, device=device, unet_model=LingBotModel
        )
        self.image_to_video = False
        self.model_sampling = LingBotSampling(model_config)

    def concat_cond(self, **kwargs) -> None:
        """Nothing joins the noise as a whole: the network takes each block's part of the picture itself."""

    def extra_conds(self, **kwargs) -> dict[str, Any]:
        """The host's, with the picture of the whole video, its camera and its window."""
        out = super().extra_conds(**kwargs)
        if kwargs.get("concat_latent_image") is not None:
            out["image"] = comfy.conds.CONDRegular(super().concat_cond(**kwargs))
        for name, key in (("camera", CAMERA_KEY), ("window", WINDOW_KEY)):
            if kwargs.get(key) is not None:
                out[name] = comfy.conds.CONDConstant(kwargs[key])
        return out


def window_of(conds: dict[str, list[dict]]) -> AttentionWindow | None:
    """The window that a guider's conditionings carry, if any does."""
    return _carried(conds, WINDOW_KEY)


def camera_of(conds: dict[str, list[dict]]) -> LatentCamera | None:
    """The camera that a guider's conditionings carry, if any does."""
    return _carried(conds, CAMERA_KEY)


def solver_of(conds: dict[str, list[dict]]) -> str | None:
    """The solver that a guider's conditionings ask for, if any does."""
    return _carried(conds, SOLVER_KEY)


def _carried(conds: dict[str, list[dict]], key: str) -> Any:
    return next((cond[key] for group in conds.values() for cond in group if cond.get(key)), None)


class LingBotConfig(comfy.supported_models.WAN21_CausalAR_T2V):
    """What the host asks of a model class before it makes one."""

    sampling_settings = {"shift": SHIFT}

    def get_model(self, state_dict, prefix="", device=None) -> LingBotWorld:
        return LingBotWorld(self, device=device)


def build(weights: dict[str, torch.Tensor], metadata: dict[str, str], options: dict, disable_dynamic: bool = False):
    """MODEL of LingBot-World weights in the host's names, placed and cast as the host would do it.

    Args:
        metadata: with a `config` for sizes that the weights do not show.
        options: `dtype` of the weights, `fp8_optimizations`.
    """
    weights, metadata = comfy.utils.convert_old_quants(weights, "", metadata=metadata)
    detected = comfy.model_detection.model_config_from_unet(weights, "", metadata=metadata)
    config = LingBotConfig(detected.unet_config | {"camera_channels": camera_channels(weights)})
    config.quant_config = detected.quant_config
    return assembled(config, weights, options, disable_dynamic)

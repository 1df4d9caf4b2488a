"""MODEL from a model class and its weights. The host's own loader chooses among its own classes only, so its steps are
taken here."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.utils
import torch


def assembled(config: Any, weights: dict[str, torch.Tensor], options: dict, disable_dynamic: bool = False):
    """MODEL of a host's model config, placed and cast as the host would do it.

    Args:
        weights: in the names of the config's network; old quantised layouts are converted before.
        options: `dtype` of the weights, `fp8_optimizations`.
    """
    management = comfy.model_management
    load_device, offload_device = management.get_torch_device(), management.unet_offload_device()
    supported = config.supported_inference_dtypes
    dtype, stored = options.get("dtype"), None
    if config.quant_config is None:
        stored = comfy.utils.weight_dtype(weights)
    if dtype is None:
        count = comfy.utils.calculate_parameters(weights)
        dtype = management.unet_dtype(model_params=count, supported_dtypes=list(supported), weight_dtype=stored)
    cast = management.unet_manual_cast(dtype if config.quant_config is None else None, load_device, supported)
    config.set_inference_dtype(dtype, cast, device=load_device)
    if options.get("fp8_optimizations"):
        config.optimizations["fp8"] = True
    model = config.get_model(weights, "")
    patcher_class = comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    patcher = patcher_class(model, load_device=load_device, offload_device=offload_device)
    if not management.is_device_cpu(offload_device):
        model.to(offload_device)
    model.load_model_weights(weights, "", assign=patcher.is_dynamic())
    return patcher

"""LongCat-Video as a ComfyUI model: what of a conditioning and a latent reaches the network, and its loading."""

from __future__ import annotations

import logging
from typing import Any

import comfy.conds
import comfy.model_base
import comfy.supported_models
import comfy.utils
import torch

from ...quantwm_core import CacheSettings
from ..assembling import assembled
from .checkpoint import Facts, facts, network_weights, sizes
from .guidance import guided_flow
from .network import LongCatModel
from .run import Runs, given_frames

logger = logging.getLogger(__name__)

# Under which a CONDITIONING says how many latent frames are given.
GIVEN_KEY = "quantwm_given_frames"


class LongCatVideo(comfy.model_base.BaseModel):
    """The base model. Given frames are those at the start of a latent that its noise mask keeps."""

    def __init__(self, model_config, device=None) -> None:
        super().__init__(model_config, comfy.model_base.ModelType.FLOW, device=device, unet_model=LongCatModel)

    def extra_conds(self, **kwargs) -> dict[str, Any]:
        """The prompt, and the given frames, clean.

        Raises:
            ValueError: when nothing is left to be made, or the latent is not the one that belongs to the conditioning.
        """
        out = super().extra_conds(**kwargs)
        if kwargs.get("cross_attn") is not None:
            out["c_crossattn"] = comfy.conds.CONDRegular(kwargs["cross_attn"])
        count = given_frames(kwargs.get("denoise_mask"))
        expected = kwargs.get(GIVEN_KEY, count)
        if count != expected:
            raise ValueError(
                f"the prompt comes with {expected} given latent frames and the latent keeps {count}. Connect the "
                "latent of the LongCat Conditioning that the prompt comes from, noise mask included."
            )
        if count == kwargs["noise"].shape[2]:
            raise ValueError(
                f"all {count} latent frames are given, so none is left to be made. Raise length in LongCat "
                "Conditioning."
            )
        if count:
            out["given"] = comfy.conds.CONDRegular(kwargs["latent_image"][:, :, :count])
        return out


class LongCatConfig(comfy.supported_models.WAN21_T2V):
    """What the host asks of a model class before it makes one; text encoder and VAE are Wan's."""

    unet_config = {"image_model": "longcat_video"}
    # In float16 nobody has published results.
    supported_inference_dtypes = [torch.bfloat16, torch.float32]

    def __init__(self, network: dict[str, Any], facts: Facts) -> None:
        super().__init__({**self.unet_config, **network, "attends_padding": facts.attends_padding})
        self.sampling_settings = {"shift": facts.shift}
        self.facts = facts

    def get_model(self, state_dict, prefix="", device=None) -> LongCatVideo:
        return LongCatVideo(self, device=device)


def build(
    stored: dict[str, torch.Tensor],
    metadata: dict[str, str],
    path: str,
    options: dict[str, Any],
    disable_dynamic: bool = False,
):
    """MODEL of LongCat-Video weights in either published layout; see `checkpoint`.

    Args:
        path: of the checkpoint, for its configuration files and for messages.
        options: `dtype` of the weights, `fp8_optimizations`.
    """
    stored, metadata = comfy.utils.convert_old_quants(stored, "", metadata=metadata)
    weights = network_weights(stored, path)
    said = facts(path, metadata)
    config = LongCatConfig(sizes(weights), said)
    config.quant_config = comfy.utils.detect_layer_quantization(weights, "")
    model = assembled(config, weights, options, disable_dynamic)
    model.set_model_sampler_cfg_function(guided_flow)
    Runs(CacheSettings(method="off")).attach(model)
    logger.info("LongCat-Video: %s", said.text().replace("\n", ", "))
    return model


def describe(model: Any) -> str | None:
    """Some lines about a MODEL, if it is LongCat-Video."""
    config = model.model.model_config
    if not isinstance(config, LongCatConfig):
        return None
    network = model.model.diffusion_model
    shape = f"{network.num_layers} layers x {network.num_heads} heads x {network.head_dim}"
    return f"LongCat-Video, {shape}\n{config.facts.text()}"

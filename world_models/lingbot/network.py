"""LingBot-World's network: the host's causal Wan with a camera in every block and a picture beside the noise.

Layer names are those of the public checkpoints, so weights load as they are. Facts: the public code of LingBot-World
(Robbyant/lingbot-world) and Quant-VideoGen's copy of it.
"""

from __future__ import annotations

import comfy.ldm.common_dit
import comfy.model_management
import torch
import torch.nn as nn
from comfy.ldm.flux.math import apply_rope1
from comfy.ldm.modules.attention import optimized_attention
from comfy.ldm.wan.ar_model import CausalWanAttentionBlock, CausalWanModel, CausalWanSelfAttention
from comfy.ldm.wan.model import WanModel, repeat_e, sinusoidal_embedding_1d
from torch.nn.functional import pad, silu

from .camera import ACT_CHANNELS, LATENT_PIXELS, RAY_CHANNELS, LatentCamera, unshuffled
from .window import AttentionWindow, WindowCache

CAMERA_LAYERS = ("patch_embedding_wancamctrl", "c2ws_hidden_states_layer1", "c2ws_hidden_states_layer2")
CAMERA_BLOCK_LAYERS = ("cam_injector_layer1", "cam_injector_layer2", "cam_scale_layer", "cam_shift_layer")


class LingBotSelfAttention(CausalWanSelfAttention):
    """The host's cached self-attention, on a cache that may roll."""

    def forward(self, x, freqs, kv_cache=None, transformer_options={}):  # noqa: B006  (the host's signature)
        if not isinstance(kv_cache, WindowCache):
            return super().forward(x, freqs, kv_cache=kv_cache, transformer_options=transformer_options)
        batch, tokens = x.shape[:2]
        heads = (batch, tokens, self.num_heads, self.head_dim)
        q = apply_rope1(self.norm_q(self.q(x)).view(heads), freqs)
        k = apply_rope1(self.norm_k(self.k(x)).view(heads), freqs)
        keys, values = kv_cache.write(k, self.v(x).view(heads))
        q, keys, values = (t.view(batch, -1, self.dim) for t in (q, keys, values))
        out = optimized_attention(q, keys, values, heads=self.num_heads, transformer_options=transformer_options)
        return self.o(out)


class LingBotBlock(CausalWanAttentionBlock):
    """The host's block; between self- and cross-attention the camera scales and shifts every token."""

    def __init__(self, cross_attn_type, dim, *shape, operation_settings, **kwargs):
        super().__init__(cross_attn_type, dim, *shape, operation_settings=operation_settings, **kwargs)
        self.self_attn = LingBotSelfAttention(
            dim, self.num_heads, self.window_size, self.qk_norm, self.eps, operation_settings=operation_settings
        )
        for name in CAMERA_BLOCK_LAYERS:
            setattr(self, name, _square_linear(dim, operation_settings))

    def forward(self, x, e, freqs, context, camera=None, kv_cache=None, crossattn_cache=None, transformer_options={}):  # noqa: B006
        """One block; `x` `[B, S, C]`, `e` `[B, frames, 6, C]`, `camera` `[1, S, C]` or None."""
        modulation = comfy.model_management.cast_to(self.modulation, dtype=x.dtype, device=x.device)
        shift1, scale1, gate1, shift2, scale2, gate2 = (repeat_e(part, x) for part in (modulation + e).unbind(2))
        x = x.contiguous()
        y = torch.addcmul(shift1, self.norm1(x), 1 + scale1)
        y = self.self_attn(y, freqs, kv_cache=kv_cache, transformer_options=transformer_options)
        x = torch.addcmul(x, y, gate1)
        del y
        if camera is not None:
            x = self.inject(x, camera)
        x = x + self._attend_text(self.norm3(x), context, crossattn_cache, transformer_options)
        y = self.ffn(torch.addcmul(shift2, self.norm2(x), 1 + scale2))
        return torch.addcmul(x, y, gate2)

    def inject(self, x: torch.Tensor, camera: torch.Tensor) -> torch.Tensor:
        """Tokens `[B, S, C]` scaled and shifted by what this block makes of the camera `[1, S, C]`."""
        camera = camera + self.cam_injector_layer2(silu(self.cam_injector_layer1(camera)))
        return torch.addcmul(self.cam_shift_layer(camera), x, 1 + self.cam_scale_layer(camera))

    def _attend_text(self, x, context, cache, transformer_options) -> torch.Tensor:
        """Cross-attention; the text's keys and values are computed once a run, as the text does not change."""
        attn = self.cross_attn
        if not cache["is_init"]:
            cache |= {"k": attn.norm_k(attn.k(context)), "v": attn.v(context), "is_init": True}
        q = attn.norm_q(attn.q(x))
        out = optimized_attention(
            q, cache["k"], cache["v"], heads=self.num_heads, transformer_options=transformer_options
        )
        return attn.o(out)


class LingBotModel(CausalWanModel):
    """Denoises block by block, like the host's causal model, and needs the picture and camera of each block.

    camera_channels: numbers a pixel that the camera embedding takes: rays, or directions and keys (the act variants).
    """

    def __init__(
        self, image_model=None, device=None, dtype=None, operations=None, camera_channels=RAY_CHANNELS, **config
    ):
        # The class between would fix the kind of block.
        WanModel.__init__(
            self,
            image_model=image_model,
            wan_attn_block_class=LingBotBlock,
            device=device,
            dtype=dtype,
            operations=operations,
            **config,
        )
        settings = {"operations": operations, "device": device, "dtype": dtype}
        pixels = LATENT_PIXELS**2 * self.patch_size[0] * self.patch_size[1] * self.patch_size[2]
        self.takes_keys = camera_channels == ACT_CHANNELS
        self.patch_embedding_wancamctrl = operations.Linear(
            camera_channels * pixels, self.dim, device=device, dtype=dtype
        )
        self.c2ws_hidden_states_layer1 = _square_linear(self.dim, settings)
        self.c2ws_hidden_states_layer2 = _square_linear(self.dim, settings)

    def init_kv_caches(self, batch_size, max_seq_len, device, dtype) -> list[WindowCache]:
        """Empty caches, one a layer; see `WindowCache`."""
        shape = (max_seq_len, batch_size, self.num_heads, self.head_dim)
        return [WindowCache(*shape, device, dtype) for _ in range(self.num_layers)]

    def camera_embedding(
        self, camera: LatentCamera, frames: torch.Tensor, height: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Camera tokens `[1, S, C]` of some latent frames (indices `[n]`), for latents of `height` x `width`."""
        look = camera.act_rays if self.takes_keys else camera.rays
        rays = look(frames, height * LATENT_PIXELS, width * LATENT_PIXELS)
        tokens = self.patch_embedding_wancamctrl(unshuffled(rays, self.patch_size).to(dtype)[None])
        return tokens + self.c2ws_hidden_states_layer2(silu(self.c2ws_hidden_states_layer1(tokens)))

    def forward_block(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor,
        start_frame: int,
        kv_caches: list,
        crossattn_caches: list[dict],
        image: torch.Tensor,
        camera: LatentCamera | None = None,
        window: AttentionWindow | None = None,
        transformer_options: dict | None = None,
    ) -> torch.Tensor:
        """Flow of one block of latent frames.

        Args:
            x: noisy latents `[B, 16, n, H, W]`.
            timestep: `[B, n]`.
            context: text `[B, L, text width]`; shorter texts are filled up with zeros, which are attended.
            start_frame: position of the block in the video.
            kv_caches: one a layer, with `make_room`; they roll before the first pass of a block.
            image: mask and picture `[B, 20, T, H, W]` of the whole video.
            camera: of the whole video; without one no block is scaled and shifted.
        """
        options = transformer_options or {}
        block = torch.arange(start_frame, start_frame + x.shape[2], device=x.device)
        image = image[:, :, block.clamp(max=image.shape[2] - 1)]
        x = comfy.ldm.common_dit.pad_to_patch_size(torch.cat((x, image.to(x)), dim=1), self.patch_size)
        frames, height, width = x.shape[2:]
        # Positions in float32: bfloat16 would merge those of frames beyond 256.
        freqs = self.rope_encode(frames, height, width, t_start=start_frame, device=x.device, dtype=torch.float32)
        embedded = None
        if camera is not None:
            known = block.clamp(max=len(camera.poses) - 1)
            embedded = self.camera_embedding(camera, known, height, width, x.dtype)
        x = self.patch_embedding(x.float()).to(x.dtype)
        grid = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        if window is not None:
            window.check_block(frames)
            per_frame = x.shape[1] // frames
            for cache in kv_caches:
                cache.make_room(x.shape[1], window.size * per_frame, window.sink * per_frame)

        steps = sinusoidal_embedding_1d(self.freq_dim, timestep.flatten()).to(x.dtype)
        e = self.time_embedding(steps).unflatten(0, timestep.shape)
        e0 = self.time_projection(e).unflatten(2, (6, self.dim))
        context = self.text_embedding(pad(context, (0, 0, 0, max(0, self.text_len - context.shape[1]))))
        for layer, cache, text in zip(self.blocks, kv_caches, crossattn_caches):
            x = layer(
                x,
                e0,
                freqs,
                context,
                camera=embedded,
                kv_cache=cache,
                crossattn_cache=text,
                transformer_options=options,
            )
        return self.unpatchify(self.head(x, e), grid)

    def forward(self, x, timestep, context, transformer_options={}, image=None, camera=None, window=None, **kwargs):  # noqa: B006
        """One call of the host's sampler, which names the block in `transformer_options`."""
        state = transformer_options.get("ar_state")
        if state is None:
            raise ValueError("LingBot-World makes a video block by block. Sample it with Sampler AR Video.")
        if image is None:
            raise ValueError("LingBot-World starts from a picture. Connect LingBot Conditioning to the guider.")
        return self.forward_block(
            x=x,
            timestep=timestep[:, None].expand(-1, x.shape[2]),
            context=context,
            start_frame=state["start_frame"],
            kv_caches=state["kv_caches"],
            crossattn_caches=state["crossattn_caches"],
            image=image,
            camera=camera,
            window=window,
            transformer_options=transformer_options,
        )


def _square_linear(dim: int, settings: dict) -> nn.Module:
    return settings["operations"].Linear(dim, dim, device=settings["device"], dtype=settings["dtype"])

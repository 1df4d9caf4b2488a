"""Queries, keys and values of real rollouts, for work on the cache codec away from any model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .network import HEADS, LAYERS, rotate
from .rollout import Rollout, Worlds


class Recorder:
    """Keeps what each layer computed last at each cache position, which is the clean pass."""

    def __init__(self) -> None:
        self.passes: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def patch(self, model) -> None:
        """Put the recorder in front of every self-attention of a model clone."""
        for layer in range(LAYERS):
            name = f"diffusion_model.blocks.{layer}.self_attn"
            module = model.get_model_object(name)
            model.add_object_patch(f"{name}.forward", self._forward(layer, module, module.forward))

    def _forward(self, layer: int, module, original):
        def forward(x: Tensor, freqs: Tensor, kv_cache=None, transformer_options=None) -> Tensor:
            query, key = (
                rotate(norm(project(x)).unflatten(2, (HEADS, -1)), freqs)
                for norm, project in ((module.norm_q, module.q), (module.norm_k, module.k))
            )
            value = module.v(x).unflatten(2, (HEADS, -1))
            self.passes[layer, kv_cache["end"]] = tuple(t.to("cpu", torch.bfloat16) for t in (query, key, value))
            return original(x, freqs, kv_cache=kv_cache, transformer_options=transformer_options or {})

        return forward

    def tensors(self, layers: range) -> dict[str, Tensor]:
        """`layer{i}.{q,k,v}`: [worlds, tokens, heads, head_dim] after RoPE, all blocks in order."""
        result = {}
        for layer in layers:
            blocks = [parts for (number, _), parts in sorted(self.passes.items()) if number == layer]
            for name, pieces in zip("qkv", zip(*blocks)):
                result[f"layer{layer}.{name}"] = torch.cat(pieces, dim=1).contiguous()
        return result


def dump(rollout: Rollout, worlds: Worlds, seed_frames: int, folder: Path) -> None:
    """Write kv_dump_0.safetensors (even layers) and kv_dump_1.safetensors (odd layers)."""
    recorder = Recorder()
    rollout(worlds, seed_frames, prepare=recorder.patch)
    metadata = {
        "seed_frames": str(seed_frames),
        "frames": str(worlds.frames.shape[1]),
        "frames_per_block": "3",
        "tokens_per_frame": "96",
    }
    for part in range(2):
        tensors = recorder.tensors(range(part, LAYERS, 2))
        save_file(tensors, folder / f"kv_dump_{part}.safetensors", metadata)

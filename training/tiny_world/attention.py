"""Block-causal attention over [clean clip | noisy copy 1 | ... | noisy copy R] in one sequence.

The clean part plays the KV cache: a noisy block sees the clean blocks before it and itself, a clean block
sees clean blocks up to itself. How the clip is cut into blocks changes from step to step, so that the model
knows every way in which the host fills its cache: a seed of any length in one pass, then blocks of three, two
or one.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

_MASK_TENSORS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)
_BLOCK = 3


def random_partition(frames: int, rng: random.Random) -> list[int]:
    """Block sizes that add up to `frames`: mostly threes, more often than not after one longer seed."""
    seed = rng.randint(1, max(1, 2 * frames // 3)) if rng.random() < 0.55 else 0
    block = rng.choice((1, 2)) if rng.random() < 0.15 else _BLOCK
    sizes = [seed] if seed else []
    while (left := frames - sum(sizes)) > 0:
        sizes.append(min(block, left))
    return sizes


class TeacherForcingAttention:
    """The mask of one sequence layout, switchable between partitions without changing any tensor's identity.

    Compiled code keeps referring to the same tensors; `select` only overwrites what is in them.
    """

    def __init__(self, partitions: list[list[int]], copies: int, tokens: int, device: torch.device, flex: bool) -> None:
        self.length = (1 + copies) * sum(partitions[0]) * tokens
        self.weight = _loss_weight(partitions[0]).to(device)
        self.block_of_frame = _block_of_frame(partitions[0]).to(device)
        self._flex = flex
        self._visible = _visibility(self.block_of_frame, tokens)
        self._choices = []
        for sizes in partitions:
            self.block_of_frame.copy_(_block_of_frame(sizes))
            tensors = [tensor.clone() for tensor in self._tensors_of(self._make_mask())]
            self._choices.append((_block_of_frame(sizes).to(device), _loss_weight(sizes).to(device), tensors))
        self.mask = self._make_mask()

    def select(self, index: int) -> None:
        """Switch to partition `index`."""
        blocks, self.weight, tensors = self._choices[index]
        self.block_of_frame.copy_(blocks)
        for mine, chosen in zip(self._tensors_of(self.mask), tensors):
            mine.copy_(chosen)

    def _make_mask(self) -> Tensor | BlockMask:
        if not self._flex:
            index = torch.arange(self.length, device=self.block_of_frame.device)
            return self._visible(None, None, index[:, None], index[None])
        device = self.block_of_frame.device
        return create_block_mask(self._visible, None, None, self.length, self.length, device=device)

    @staticmethod
    def _tensors_of(mask: Tensor | BlockMask) -> list[Tensor]:
        return [mask] if isinstance(mask, Tensor) else [getattr(mask, name) for name in _MASK_TENSORS]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | BlockMask) -> Tensor:
    """Attention [B, H, L, D] under a dense mask or a FlexAttention block mask."""
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return flex_attention(query, key, value, block_mask=mask)


def _visibility(block_of_frame: Tensor, tokens: int) -> Callable:
    """FlexAttention's mask function; reads the current partition from `block_of_frame`."""
    frames = len(block_of_frame)
    span = frames * tokens

    def visible(batch, head, query: Tensor, key: Tensor) -> Tensor:
        query_block = block_of_frame[(query % span) // tokens]
        key_block = block_of_frame[(key % span) // tokens]
        past = (key < span) & (key_block < query_block)
        own = (key // span == query // span) & (key_block == query_block)
        return past | own

    return visible


def _block_of_frame(sizes: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


def _loss_weight(sizes: list[int]) -> Tensor:
    """1 per frame, 0 for a long seed: it is given, never generated."""
    weight = torch.ones(sum(sizes))
    if sizes[0] > _BLOCK:
        weight[: sizes[0]] = 0
    return weight

"""`RaggedAttention`: attention within each of many texts that lie end to end, every token to every other.

Nothing is padded and nothing is kept between steps.  `TorchRaggedAttention` serves every device and is what others
are compared with; `VarlenAttention` is one kernel for all texts of a step, on NVIDIA GPUs.  Used by
`engine.models.encoder`, chosen by `select_ragged_attention`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

_VARLEN_DTYPES = (torch.float16, torch.bfloat16)
_VARLEN_MAX_HEAD_DIM = 256


class RaggedAttention(Protocol):
    """Attention of `num_heads` heads of `head_dim`; H is their product."""

    def begin_step(self, lengths: Sequence[int]) -> None:
        """Each text's number of tokens, in order, for the `attend`s that follow."""
        ...

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values side by side [T, 3 H] -> softmax(q kᵀ / sqrt(head_dim)) v of each text [T, H]."""
        ...


class TorchRaggedAttention:
    """One call for each run of neighbouring texts of one length, so texts come best in order of their lengths."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        self._num_heads = num_heads
        self._head_dim = head_dim
        self._runs: list[tuple[int, int, int]] = []

    def begin_step(self, lengths: Sequence[int]) -> None:
        self._runs, start = [], 0
        for length, group in itertools.groupby(lengths):
            count = len(list(group))
            self._runs.append((start, count, length))
            start += count * length

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        width = self._num_heads * self._head_dim
        output = qkv.new_empty(qkv.shape[0], width)
        for start, count, length in self._runs:
            run = qkv[start : start + count * length].view(count, length, 3, self._num_heads, self._head_dim)
            query, key, value = run.permute(2, 0, 3, 1, 4)
            attended = scaled_dot_product_attention(query, key, value)
            target = output[start : start + count * length].view(count, length, self._num_heads, self._head_dim)
            target.copy_(attended.transpose(1, 2))
        return output


class VarlenAttention:
    """torch's FlashAttention over texts of different lengths (Dao 2023, https://arxiv.org/abs/2307.08691)."""

    def __init__(self, num_heads: int, head_dim: int, device: torch.device) -> None:
        self._num_heads = num_heads
        self._head_dim = head_dim
        self._device = device
        self._starts = torch.empty(0)
        self._longest = 0

    @staticmethod
    def is_supported(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the kernel exists for such heads."""
        fits = dtype in _VARLEN_DTYPES and head_dim % 8 == 0 and head_dim <= _VARLEN_MAX_HEAD_DIM
        return device.type == "cuda" and fits and torch.cuda.get_device_capability(device) >= (8, 0)

    def begin_step(self, lengths: Sequence[int]) -> None:
        starts = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)
        self._starts = starts.pin_memory().to(self._device, non_blocking=True)
        self._longest = max(lengths)

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        # Its module takes a while to import and warns, and CPUs need it not.
        from torch.nn.attention.varlen import varlen_attn

        query, key, value = qkv.view(-1, 3, self._num_heads, self._head_dim).unbind(1)
        attended = varlen_attn(query, key, value, self._starts, self._starts, self._longest, self._longest)
        assert isinstance(attended, torch.Tensor)
        return attended.reshape(qkv.shape[0], -1)


def select_ragged_attention(num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> RaggedAttention:
    """The fastest that serves such heads."""
    if VarlenAttention.is_supported(head_dim, dtype, device):
        return VarlenAttention(num_heads, head_dim, device)
    return TorchRaggedAttention(num_heads, head_dim)

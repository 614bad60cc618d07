"""`DenseAttention`: the attention contract over plain lists of keys and values, written to be obviously right.

Each sequence of the batch keeps its own keys and values per layer; blocks and slots are
ignored.  Sequences are told apart by their place in the batch, so every step must hold the
same sequences in the same order.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from engine.attention.backend import AttentionMetadata, AttentionSpec, HeadNorms
from engine.attention.heads import split_heads
from engine.layers.rotary import Rotation


class DenseAttention:
    """An `AttentionBackend`: softmax(q kᵀ / sqrt(head_dim)) v with a causal mask, one sequence at a time."""

    name = "dense"
    is_capturable = False

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        self._num_kv_heads, self._head_dim = num_kv_heads, head_dim
        self._cache: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._query_starts: tuple[int, ...] = ()

    @staticmethod
    def reasons_unsupported(spec: AttentionSpec, device: torch.device) -> list[str]:
        return []

    def allocate(self, num_blocks: int) -> None:
        pass

    def prompt_tiles(self, size: int, start: int, num_tokens: int) -> np.ndarray:
        raise NotImplementedError("this backend is not captured")

    def begin_step(self, metadata: AttentionMetadata) -> None:
        self._query_starts = metadata.query_starts

    def attend(self, layer_index: int, qkv: torch.Tensor, rotation: Rotation, norms: HeadNorms | None) -> torch.Tensor:
        query, key, value = split_heads(qkv, self._num_kv_heads, self._head_dim, rotation, norms)
        outputs = []
        for sequence, (first, last) in enumerate(pairwise(self._query_starts)):
            keys, values = key[first:last], value[first:last]
            if cached := self._cache.get((layer_index, sequence)):
                keys, values = torch.cat((cached[0], keys)), torch.cat((cached[1], values))
            self._cache[layer_index, sequence] = keys, values
            outputs.append(_attend_sequence(query[first:last], keys, values))
        return torch.cat(outputs).flatten(1)


def ragged_metadata(*lengths: int) -> AttentionMetadata:
    """Metadata of a step that computes `lengths` tokens of so many sequences; slots and blocks stay empty."""
    query_starts = (0, *torch.tensor(lengths).cumsum(0).tolist())
    return AttentionMetadata(
        num_decodes=0,
        slot_mapping=torch.empty(0, dtype=torch.int64),
        block_tables=torch.empty(0, 0, dtype=torch.int32),
        rows=torch.arange(len(lengths), dtype=torch.int32),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        query_starts=query_starts,
        host_context_lens=lengths,
    )


def _attend_sequence(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Query [T, num_heads, head_dim] over keys and values [C, num_kv_heads, head_dim]; queries are the last T."""
    num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads, _ = keys.shape
    keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=1)
    values = values.repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys.float()) / head_dim**0.5
    unseen = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)
    weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values.float()).to(query.dtype)

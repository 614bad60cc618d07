"""The contract of an attention backend, and the metadata a step hands to it.

A backend owns the layout of the KV cache and computes attention over paged keys and
values for a ragged batch.  The model runner builds one `AttentionMetadata` per step; each
attention layer calls `attend` once.  Backends know nothing of sequences or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Shape of the KV cache: one key and one value vector per layer, token and KV head."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """2 x layers x kv_heads x head_dim x dtype bytes (keys and values)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """How the flat tokens of one step map to sequences and to the KV cache.

    T tokens of S sequences are laid end to end, `num_decodes` single-token sequences first.

    `slot_mapping`  int64 [T]          block id x block size + offset, where each token's K and V go
    `block_tables`  int32 [S, B]       block ids of each sequence, padded with 0
    `query_starts`  tuple, S + 1       first token of each sequence, then T
    `context_lens`  tuple, S           tokens each sequence attends to, those of this step included
    """

    num_decodes: int
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]


class AttentionBackend(Protocol):
    """Attention over a paged KV cache, for one model."""

    name: str

    @staticmethod
    def reasons_unsupported(spec: CacheSpec, device: torch.device) -> list[str]:
        """Sentences that say why this backend cannot serve `spec`; empty when it can."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache.  Raises `InsufficientMemory`."""
        ...

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Prepare whatever is shared by all layers of the coming step."""
        ...

    def attend(self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store `key` and `value`, then return causal attention of `query` over the cache.

        query [T, num_heads, head_dim]; key and value [T, num_kv_heads, head_dim], rotary
        already applied.  Returns [T, num_heads, head_dim].
        """
        ...

"""The contract of an attention backend, and the metadata a step hands to it.

A backend owns the KV cache and everything between a layer's query-key-value product and its
output product: the norms of heads, the rotation, storing keys and values, and attention over
the cache for a ragged batch.  The model runner builds one `AttentionMetadata` per step; each
attention layer calls `attend` once.  Backends know nothing of sequences or scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.api.errors import InsufficientMemory
from engine.layers.rotary import Rotation


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


def no_room_for_cache(spec: CacheSpec, num_blocks: int) -> InsufficientMemory:
    """The error of a backend that cannot allocate so many blocks."""
    needed_gib = num_blocks * spec.bytes_per_block / 2**30
    return InsufficientMemory(
        f"The KV cache of {needed_gib:.1f} GiB could not be allocated; lower gpu_memory_utilization or max_model_len."
    )


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a backend must serve: a cache, the query heads that read it, and at most so many sequences in a step."""

    cache: CacheSpec
    num_heads: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of every query and key head before rotation; weights [head_dim]."""

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """How the flat tokens of one step map to sequences and to the KV cache.

    T tokens of S sequences are laid end to end, `num_decodes` single-token sequences first.

    `slot_mapping`       int64 [T]     block id x block size + offset, where each token's K and V go; -1: nowhere
    `block_tables`       int32 [R, B]  block ids of every row of the row table
    `rows`               int32 [S]     the line of `block_tables` of each sequence; -1 pads a captured batch
    `context_lens`       int32 [S]     tokens each sequence attends to, those of this step included; 0 for padding
    `query_starts`       S + 1         first token of each sequence, then T, known to the host
    `host_context_lens`  S             `context_lens` as the host knows them; empty in a captured step, where they
                                       change from replay to replay and all sequences are decodes
    `prompt_tiles`                     in a captured step of one prompt, the backend's own description of it, which
                                       also changes from replay to replay (`AttentionBackend.prompt_tiles`)
    """

    num_decodes: int
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    rows: torch.Tensor
    context_lens: torch.Tensor
    query_starts: tuple[int, ...]
    host_context_lens: tuple[int, ...]
    prompt_tiles: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """Attention over a paged KV cache, for one model."""

    name: str
    is_capturable: bool
    """Whether steps of decodes alone, or of one prompt alone, may be captured in CUDA graphs."""

    @staticmethod
    def reasons_unsupported(spec: AttentionSpec, device: torch.device) -> list[str]:
        """Sentences that say why this backend cannot serve `spec`; empty when it can."""
        ...

    @property
    def max_blocks(self) -> int:
        """How far `resize` can grow the cache that is allocated."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """What the cache holds now that torch's allocator knows nothing of."""
        ...

    @property
    def rounding_bytes(self) -> int:
        """How much more than its blocks the cache may hold, because memory comes in granules."""
        ...

    def allocate(self, num_blocks: int, max_blocks: int | None = None) -> None:
        """Allocate the KV cache, in place of one allocated before: memory for `num_blocks`, all of it zeros.

        Addresses are reserved for `max_blocks` (default: `num_blocks`) and never change afterwards, since captured
        graphs and recorded programs hold them.  Where the system cannot do that, `max_blocks` becomes less.
        Raises `InsufficientMemory`.
        """
        ...

    def resize(self, num_blocks: int) -> int:
        """Have memory for `num_blocks` from now on, 0 to `max_blocks`; returns for how many there really is.

        Shrinking may keep what lies in one unit of memory with the last block that stays, growing may end early.
        Blocks that stay keep their content, new ones are zeros.  Steps that read or write blocks beyond the new end
        must have run.  Raises `InsufficientMemory`, with nothing changed, when growing gets nothing at all.
        """
        ...

    def move_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks, keys and values of all layers, in order with the steps launched before and after.

        No block is both a source and a target.
        """
        ...

    def prompt_tiles(self, size: int, start: int, num_tokens: int) -> np.ndarray:
        """What a captured step of one prompt needs to know, int32 of a shape that depends on `size` alone.

        The prompt computes `num_tokens` tokens from position `start` on, and is padded to `size` tokens.  Only
        backends that are capturable have this.
        """
        ...

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Prepare whatever is shared by all layers of the coming step."""
        ...

    def attend(self, layer_index: int, qkv: torch.Tensor, rotation: Rotation, norms: HeadNorms | None) -> torch.Tensor:
        """Store the step's keys and values, then return causal attention of its queries over the cache.

        Those of prompts are stored before anything is read, since a prefix may be read in the step that computes
        it; a decode's are read by itself alone (`engine.core.prefix_cache`).

        qkv [T, (num_heads + 2 num_kv_heads) x head_dim]: query, key and value heads as projected; the backend
        may overwrite it.  Returns [T, num_heads x head_dim].  Scores are scaled by head_dim ** -0.5.
        """
        ...

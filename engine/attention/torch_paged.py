"""Paged attention in plain torch: the CPU backend, and the oracle for device kernels.

Keys and values of a layer lie in one tensor of token slots, `[num_blocks x block_size,
num_kv_heads, head_dim]`, so a block is one contiguous run of memory.  Decoding sequences
are gathered block by block, in groups of similar context length, and attended to in one
call per group; each prefilling sequence is one call.  Query heads that share a KV head
are packed as rows of one matrix, so grouped-query attention copies no keys.

Runs on any device torch supports.  Chosen by `engine.attention.select`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.backend import AttentionMetadata, AttentionSpec, HeadNorms, no_room_for_cache
from engine.attention.heads import split_heads
from engine.attention.reserved_memory import ReservedMemory, reserve_cache
from engine.layers.rotary import Rotation


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decoding sequences of similar context length.

    `members` int64 [N] positions in the batch, or None when the group is all of the batch;
    `block_ids` int64 [N x B] flat; `bias` [N, 1, 1, B x block_size] is -inf beyond each context.
    """

    members: torch.Tensor | None
    size: int
    block_ids: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence that computes several tokens: rows [first, last) of the batch.

    `block_ids` and `bias` [T, context_len] are None when nothing precedes the tokens of this
    step; then keys and values are used as they come and the mask is plainly causal.
    """

    first: int
    last: int
    context_len: int
    block_ids: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _StepPlan:
    slot_mapping: torch.Tensor
    decode_groups: tuple[_DecodeGroup, ...]
    prefills: tuple[_Prefill, ...]


class TorchPagedAttention:
    """`AttentionBackend` over scaled_dot_product_attention; scores are scaled by head_dim ** -0.5."""

    name = "torch-paged"
    is_capturable = False
    mapped_bytes = 0
    rounding_bytes = 0

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self._spec = spec.cache
        self._device = device
        self._memory: ReservedMemory | None = None
        self._keys = self._values = torch.empty(0)
        self._plan: _StepPlan | None = None

    @staticmethod
    def reasons_unsupported(spec: AttentionSpec, device: torch.device) -> list[str]:
        """Every shape on every device is supported."""
        return []

    @property
    def max_blocks(self) -> int:
        return self._keys.shape[1] // self._spec.block_size

    def allocate(self, num_blocks: int, max_blocks: int | None = None) -> None:
        """Reserve the KV cache: two zeroed tensors, which on the CPU take memory only as blocks are first used.

        On other devices their size is fixed.
        """
        spec = self._spec
        heads = (spec.num_kv_heads, spec.head_dim)
        if self._device.type == "cpu":
            self._memory = reserve_cache(spec, num_blocks, max_blocks)
            caches = self._memory.bytes.view(spec.dtype).view(2, spec.num_layers, -1, *heads)
            self._keys, self._values = caches.unbind(0)
            return
        shape = (spec.num_layers, num_blocks * spec.block_size, *heads)
        self._keys = self._values = torch.empty(0)
        try:
            # Never uninitialised, since a NaN in an unused slot would survive its zero weight.
            self._keys = torch.zeros(shape, dtype=spec.dtype, device=self._device)
            self._values = torch.zeros(shape, dtype=spec.dtype, device=self._device)
        except RuntimeError as error:
            raise no_room_for_cache(spec, num_blocks) from error

    def resize(self, num_blocks: int) -> int:
        """See `AttentionBackend.resize`; on other devices than the CPU the cache stays as it is."""
        memory = self._memory
        if memory is None:
            return self.max_blocks
        num_blocks = min(num_blocks, self.max_blocks)
        region = len(memory.bytes) // (2 * self._spec.num_layers)
        kept = region // self.max_blocks * num_blocks
        for start in range(0, len(memory.bytes), region):
            memory.release(start + kept, start + region)
        return num_blocks

    def move_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        block_size = self._spec.block_size
        for cache in (self._keys, self._values):
            for source, target in zip(sources, targets, strict=True):
                cache[:, target * block_size :][:, :block_size] = cache[:, source * block_size :][:, :block_size]

    def prompt_tiles(self, size: int, start: int, num_tokens: int) -> np.ndarray:
        raise NotImplementedError("this backend is not captured")

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Work out which blocks each sequence reads; all layers share the result."""
        num_sequences = len(metadata.host_context_lens)
        self._plan = _StepPlan(
            slot_mapping=metadata.slot_mapping,
            decode_groups=tuple(self._plan_decodes(metadata)),
            prefills=tuple(
                self._plan_prefill(metadata, sequence) for sequence in range(metadata.num_decodes, num_sequences)
            ),
        )

    def attend(self, layer_index: int, qkv: torch.Tensor, rotation: Rotation, norms: HeadNorms | None) -> torch.Tensor:
        """Norm, rotate, store, attend; shapes as in `AttentionBackend.attend`."""
        query, key, value = split_heads(qkv, self._spec.num_kv_heads, self._spec.head_dim, rotation, norms)
        return self._attend(layer_index, query, key, value).flatten(1)

    def _attend(self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Query [T, num_heads, head_dim] over the cache with `key` and `value` [T, num_kv_heads, head_dim] in it."""
        plan = self._plan
        assert plan is not None, "begin_step must come before attend"
        keys, values = self._keys[layer_index], self._values[layer_index]
        keys.index_copy_(0, plan.slot_mapping, key)
        values.index_copy_(0, plan.slot_mapping, value)

        if len(plan.decode_groups) == 1 and not plan.prefills:
            return self._attend_decodes(plan.decode_groups[0], query, keys, values)
        output = torch.empty_like(query)
        for group in plan.decode_groups:
            if group.members is None:
                output[: group.size] = self._attend_decodes(group, query[: group.size], keys, values)
            else:
                output[group.members] = self._attend_decodes(group, query[group.members], keys, values)
        for prefill in plan.prefills:
            rows = slice(prefill.first, prefill.last)
            output[rows] = self._attend_prefill(prefill, query[rows], key[rows], value[rows], keys, values)
        return output

    def _plan_decodes(self, metadata: AttentionMetadata) -> list[_DecodeGroup]:
        """Group decodes by the power of two that holds their block count, so that padding stays below half."""
        members_by_size: dict[int, list[int]] = {}
        for sequence in range(metadata.num_decodes):
            num_blocks = -(-metadata.host_context_lens[sequence] // self._spec.block_size)
            members_by_size.setdefault((num_blocks - 1).bit_length(), []).append(sequence)
        return [self._plan_decode_group(metadata, members) for members in members_by_size.values()]

    def _plan_decode_group(self, metadata: AttentionMetadata, members: list[int]) -> _DecodeGroup:
        block_size = self._spec.block_size
        context_lens = torch.tensor([metadata.host_context_lens[member] for member in members])
        num_blocks = -(-int(context_lens.max()) // block_size)
        is_whole_batch = len(members) == metadata.num_decodes
        index = torch.tensor(members, device=self._device)
        tables = metadata.block_tables[metadata.rows[index], :num_blocks]
        beyond = torch.arange(num_blocks * block_size) >= context_lens[:, None]
        bias = torch.zeros(beyond.shape, dtype=self._spec.dtype).masked_fill_(beyond, float("-inf"))
        return _DecodeGroup(
            members=None if is_whole_batch else index,
            size=len(members),
            block_ids=tables.reshape(-1).long(),
            bias=bias[:, None, None, :].to(self._device),
        )

    def _plan_prefill(self, metadata: AttentionMetadata, sequence: int) -> _Prefill:
        first, last = metadata.query_starts[sequence], metadata.query_starts[sequence + 1]
        context_len = metadata.host_context_lens[sequence]
        num_tokens = last - first
        if context_len == num_tokens:
            return _Prefill(first, last, context_len, None, None)
        num_blocks = -(-context_len // self._spec.block_size)
        positions = torch.arange(context_len - num_tokens, context_len)
        beyond = torch.arange(context_len) > positions[:, None]
        bias = torch.zeros(beyond.shape, dtype=self._spec.dtype).masked_fill_(beyond, float("-inf"))
        block_ids = metadata.block_tables[metadata.rows[sequence], :num_blocks].long()
        return _Prefill(first, last, context_len, block_ids, bias.to(self._device))

    def _gather(self, cache: torch.Tensor, block_ids: torch.Tensor, num_sequences: int) -> torch.Tensor:
        """Blocks of one layer as [num_sequences, num_kv_heads, blocks x block_size, head_dim] (a view of one copy)."""
        spec = self._spec
        blocks = cache.view(-1, spec.block_size * spec.num_kv_heads * spec.head_dim).index_select(0, block_ids)
        return blocks.view(num_sequences, -1, spec.num_kv_heads, spec.head_dim).transpose(1, 2)

    def _attend_decodes(
        self, group: _DecodeGroup, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        num_heads = query.shape[1]
        num_kv_heads = self._spec.num_kv_heads
        packed = query.view(group.size, num_kv_heads, num_heads // num_kv_heads, self._spec.head_dim)
        output = scaled_dot_product_attention(
            packed,
            self._gather(keys, group.block_ids, group.size),
            self._gather(values, group.block_ids, group.size),
            attn_mask=group.bias,
        )
        return output.reshape(group.size, num_heads, self._spec.head_dim)

    def _attend_prefill(
        self,
        prefill: _Prefill,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        if prefill.block_ids is None:
            key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        else:
            key = self._gather(keys, prefill.block_ids, 1)[:, :, : prefill.context_len]
            value = self._gather(values, prefill.block_ids, 1)[:, :, : prefill.context_len]
        output = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key,
            value,
            attn_mask=prefill.bias,
            is_causal=prefill.bias is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output[0].transpose(0, 1)

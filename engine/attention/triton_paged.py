"""Paged attention on NVIDIA GPUs: Triton kernels over blocks of one KV head each.

A step may mix decodes, which come first, with chunks of prompts.  The chunks' keys and values are
stored before anything is read, since a prefix shared through the cache may be read in the very step
that computes it; then each kind of sequence has a kernel of its own.  A decode stores its own key and
value inside its kernel: nobody else reads them in that step.

Chosen by `engine.attention.select`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.api.errors import InsufficientMemory
from engine.attention.backend import AttentionMetadata, AttentionSpec, HeadNorms, no_room_for_cache
from engine.attention.mapped_cache import GpuCache, MappedCache, PlainCache, move_blocks
from engine.kernels.decode_attention import MAX_GROUP, decode_attention
from engine.kernels.decode_plan import DecodePlan, allocate_workspace, default_tuning, plan_decode
from engine.kernels.prefill_attention import (
    EMPTY_TILE,
    PrefillTuning,
    choose_tuning,
    dense_prefill,
    plan_prefill,
    prefers_dense,
    prefill_attention,
)
from engine.kernels.rotate_store import rotate_and_store
from engine.layers.rotary import Rotation
from engine.runner.cuda_driver import cuda_driver_for
from engine.runner.device_arena import MemoryDriver
from engine.runner.transfer import upload

_MIN_HEAD_DIM = 16  # the least that a tensor core multiplies
_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Tiles int32 [n, 4] of the chunks that read the cache; `dense` are row ranges that need none of it."""

    tuning: PrefillTuning
    tiles: torch.Tensor | None
    dense: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _StepPlan:
    metadata: AttentionMetadata
    decode: DecodePlan | None
    prefill: _Prefill | None


class TritonPagedAttention:
    """`AttentionBackend` for one model, over a cache that grows and shrinks (`engine.attention.mapped_cache`)."""

    name = "triton-paged"
    is_capturable = True

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._driver: MemoryDriver | None = cuda_driver_for(device)
        self._cache: GpuCache | None = None
        self._plan: _StepPlan | None = None
        cache = spec.cache
        self._workspace = allocate_workspace(
            spec.max_num_seqs, spec.num_heads, cache.num_kv_heads, cache.head_dim, cache.dtype, device
        )

    @staticmethod
    def reasons_unsupported(spec: AttentionSpec, device: torch.device) -> list[str]:
        """Group and head size are bounded by what one tensor-core tile and the registers hold."""
        reasons = []
        if device.type != "cuda":
            reasons.append("It needs an NVIDIA GPU.")
        if spec.num_heads // spec.cache.num_kv_heads > MAX_GROUP:
            reasons.append(f"More than {MAX_GROUP} query heads share a key head.")
        if not _MIN_HEAD_DIM <= spec.cache.head_dim <= _MAX_HEAD_DIM or spec.cache.head_dim % 2:
            reasons.append(
                f"Heads of {spec.cache.head_dim} features are odd, below {_MIN_HEAD_DIM} or above {_MAX_HEAD_DIM}."
            )
        return reasons

    @property
    def max_blocks(self) -> int:
        return self._cache.max_blocks if self._cache is not None else 0

    @property
    def mapped_bytes(self) -> int:
        return self._cache.mapped_bytes if self._cache is not None else 0

    @property
    def rounding_bytes(self) -> int:
        return self._cache.rounding_bytes if self._cache is not None else 0

    def allocate(self, num_blocks: int, max_blocks: int | None = None) -> None:
        """See `AttentionBackend.allocate`; the size is fixed where the driver does not map memory."""
        spec = self._spec.cache
        self._cache = None  # frees what it holds
        if self._driver is None:
            self._cache = PlainCache(spec, self._device, num_blocks)
            return
        try:
            self._cache = MappedCache(spec, self._driver, num_blocks, max(num_blocks, max_blocks or 0))
        except InsufficientMemory as error:
            raise no_room_for_cache(spec, num_blocks) from error

    def resize(self, num_blocks: int) -> int:
        """See `AttentionBackend.resize`."""
        assert self._cache is not None, "allocate must come before resize"
        return self._cache.resize(num_blocks)

    def move_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert self._cache is not None, "allocate must come before move_blocks"
        move_blocks(self._cache, sources, targets)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Cut the step into pieces of work, which all layers share: decodes on the device, chunks on the host."""
        num_decodes, num_sequences = metadata.num_decodes, len(metadata.query_starts) - 1
        decode = None
        if num_decodes:
            cache = self._spec.cache
            tuning = default_tuning(num_decodes, cache.head_dim, cache.dtype, self._device)
            decode = plan_decode(
                metadata.rows[:num_decodes], metadata.context_lens[:num_decodes], self._workspace, tuning
            )
        prefill = self._plan_prefill(metadata) if num_decodes < num_sequences else None
        self._plan = _StepPlan(metadata, decode, prefill)

    def attend(self, layer_index: int, qkv: torch.Tensor, rotation: Rotation, norms: HeadNorms | None) -> torch.Tensor:
        """See `AttentionBackend.attend`; the queries and keys of prompts are rotated in place."""
        plan = self._plan
        assert plan is not None and self._cache is not None, "allocate and begin_step must come before attend"
        keys, values = self._cache.keys[layer_index], self._cache.values[layer_index]
        metadata = plan.metadata
        output = qkv.new_empty((qkv.shape[0], self._spec.num_heads * self._spec.cache.head_dim))
        if plan.prefill is not None:
            rotate_and_store(
                qkv, metadata.num_decodes, rotation.cos, rotation.sin, metadata.slot_mapping, keys, values, norms
            )
        if plan.decode is not None:
            decode_attention(
                qkv,
                keys,
                values,
                metadata.block_tables,
                plan.decode,
                metadata.slot_mapping,
                rotation.cos,
                rotation.sin,
                None if norms is None else norms.query_weight,
                None if norms is None else norms.key_weight,
                0.0 if norms is None else norms.eps,
                output,
                # Between the plan and the first layer the embedding is looked up by an ordinary launch, which waits
                # for all that came before; and decodes alone read no block that this step writes.
                reads_early=plan.prefill is None,
            )
        if plan.prefill is not None:
            self._attend_prefill(plan.prefill, metadata, qkv, keys, values, output)
        return output

    def prompt_tiles(self, size: int, start: int, num_tokens: int) -> np.ndarray:
        """See `AttentionBackend.prompt_tiles`: tiles int32 [n, 4], those beyond the prompt empty."""
        tuning = self._prefill_tuning(size, size)
        tiles = np.empty((-(-size // tuning.tokens_per_tile), 4), dtype=np.int32)
        tiles[:] = EMPTY_TILE
        used = plan_prefill((0, num_tokens), (start + num_tokens,), 0, tuning)
        tiles[: len(used)] = used
        return tiles

    def _prefill_tuning(self, num_tokens: int, longest_context: int) -> PrefillTuning:
        cache = self._spec.cache
        return choose_tuning(
            self._spec.num_heads,
            cache.num_kv_heads,
            cache.head_dim,
            cache.dtype,
            num_tokens,
            longest_context,
            self._device,
        )

    def _plan_prefill(self, metadata: AttentionMetadata) -> _Prefill:
        """Whole prompts for which cuDNN is faster go to it; everything else is cut into tiles."""
        cache = self._spec.cache
        starts, contexts = metadata.query_starts, metadata.host_context_lens
        first_prefill = metadata.num_decodes
        tuning = self._prefill_tuning(starts[-1] - starts[first_prefill], max(contexts[first_prefill:]))
        if metadata.prompt_tiles is not None:
            return _Prefill(tuning, metadata.prompt_tiles, dense=())
        is_dense = [
            prefers_dense(last - first, context_len, self._device, cache.dtype, cache.head_dim)
            for first, last, context_len in zip(starts, starts[1:], contexts, strict=False)
        ]
        dense = tuple(
            (starts[sequence], starts[sequence + 1])
            for sequence in range(first_prefill, len(contexts))
            if is_dense[sequence]
        )
        tiles = plan_prefill(starts, contexts, first_prefill, tuning)
        if dense:
            tiles = tiles[[not is_dense[sequence] for sequence in tiles[:, 0]]]
        return _Prefill(tuning, upload(tiles, self._device) if len(tiles) else None, dense)

    def _attend_prefill(
        self,
        prefill: _Prefill,
        metadata: AttentionMetadata,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        cache = self._spec.cache
        if prefill.tiles is not None:
            prefill_attention(
                qkv, keys, values, metadata.block_tables, metadata.rows, prefill.tiles, output, prefill.tuning
            )
        for first, last in prefill.dense:
            dense_prefill(qkv, first, last, self._spec.num_heads, cache.num_kv_heads, cache.head_dim, output)

"""Paged attention in compiled code, for the CPU: recorded as instructions of a step's program.

A block holds keys as [layer, KV head, head_dim, block_size], then values as [layer, KV head, block_size, head_dim]:
sixteen tokens of a key's dimension are one vector, as are sixteen dimensions of a token's value.  Nothing is computed
when `attend` is called; `engine.cpu.program` says what recording is.  Chosen by whoever records the model's steps
(`engine.runner.recorded_steps`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.attention.backend import AttentionMetadata, AttentionSpec, HeadNorms
from engine.attention.reserved_memory import ReservedMemory, reserve_cache
from engine.cpu.activations import LANES
from engine.cpu.attention_shape import AttentionShape, max_sums, plan_bytes
from engine.cpu.catalogue import attention_kernel, plan_kernel, store_kernel
from engine.cpu.isa import host_isa
from engine.cpu.program import Recorder, float_bits
from engine.layers.rotary import Rotation

_MAX_HEAD_DIM = 256
_PARTIAL_BYTES = 64 << 20
"""Room for the states of split contexts, which takes memory only as it is used."""


class CompiledPagedAttention:
    """`AttentionBackend` that records; scores are scaled by head_dim ** -0.5."""

    name = "compiled-paged"
    is_capturable = False
    mapped_bytes = 0
    rounding_bytes = 0

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        cache = spec.cache
        self._spec = cache
        self._num_heads = spec.num_heads
        self._shape = AttentionShape(cache.head_dim, spec.num_heads // cache.num_kv_heads, max_sums())
        self._memory = ReservedMemory(0)
        self._blocks = self._keys = self._values = torch.empty(0)
        self._recorder: Recorder | None = None
        self._plan = self._partials = self._counters = self._scratch = 0

    @staticmethod
    def reasons_unsupported(spec: AttentionSpec, device: torch.device) -> list[str]:
        """Sentences that say why this backend cannot serve `spec`; empty when it can."""
        cache = spec.cache
        reasons = []
        if device.type != "cpu":
            reasons.append(f"It runs on the CPU, not on {device.type}.")
        elif host_isa() is None:
            reasons.append("This processor lacks AVX2 or the conversion of float16.")
        if cache.head_dim % LANES or not 0 < cache.head_dim <= _MAX_HEAD_DIM:
            reasons.append(f"head_dim {cache.head_dim} is not a multiple of {LANES} up to {_MAX_HEAD_DIM}.")
        if cache.dtype not in (torch.float32, torch.float16):
            reasons.append(f"Its KV cache is float32 or float16, not {cache.dtype}.")
        if cache.block_size % LANES:
            reasons.append(f"block_size {cache.block_size} is not a multiple of {LANES}.")
        if spec.num_heads % cache.num_kv_heads:
            reasons.append(f"{spec.num_heads} query heads do not share {cache.num_kv_heads} KV heads evenly.")
        return reasons

    @property
    def max_blocks(self) -> int:
        return len(self._blocks)

    def allocate(self, num_blocks: int, max_blocks: int | None = None) -> None:
        """Reserve the KV cache: zeros that take memory only as blocks are first used.

        Keys and values of all layers of a block lie together, so that the memory in use grows with the blocks in use,
        also where the system hands it out in pages of 2 MiB.
        """
        spec = self._spec
        self._memory = reserve_cache(spec, num_blocks, max_blocks)
        half_block = spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.block_size
        self._blocks = self._memory.bytes.view(spec.dtype).view(-1, 2, half_block)
        heads = (len(self._blocks), spec.num_layers, spec.num_kv_heads)
        keys, values = self._blocks.unbind(1)
        self._keys = keys.view(*heads, spec.head_dim, spec.block_size)
        self._values = values.view(*heads, spec.block_size, spec.head_dim)

    def resize(self, num_blocks: int) -> int:
        """See `AttentionBackend.resize`; growing costs nothing, as all blocks have addresses."""
        num_blocks = min(num_blocks, self.max_blocks)
        self._memory.release(num_blocks * self._spec.bytes_per_block, len(self._memory.bytes))
        return num_blocks

    def move_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self._blocks[target].copy_(self._blocks[source])

    def prompt_tiles(self, size: int, start: int, num_tokens: int) -> np.ndarray:
        raise NotImplementedError("this backend is not captured")

    def begin_step(self, metadata: AttentionMetadata) -> None:
        raise NotImplementedError("this backend is recorded; the program's own numbers describe a step")

    def record_on(self, recorder: Recorder) -> None:
        """Record what begins a step, and all calls of `attend` that follow, on `recorder`.

        The cache must be allocated, and must stay as long as the program.
        """
        shape = self._shape
        tiles_per_piece = self._spec.num_kv_heads * shape.num_slabs
        max_partials = max(1, _PARTIAL_BYTES // (tiles_per_piece * shape.state_bytes))
        self._recorder = recorder
        self._plan = recorder.workspace(plan_bytes(recorder.max_tokens, max_partials))
        self._partials = recorder.workspace(max_partials * tiles_per_piece * shape.state_bytes)
        self._counters = recorder.workspace(8 * max_partials * tiles_per_piece)
        self._scratch = recorder.workspace(recorder.team_size * shape.scratch_bytes)
        recorder.add(plan_kernel(shape.tile_tokens), recorder.sequences, self._plan, tiles_per_piece, max_partials)

    def attend(self, layer_index: int, qkv: torch.Tensor, rotation: Rotation, norms: HeadNorms | None) -> torch.Tensor:
        """Record norm, rotation, storing and attention; tensors are handles of the recorder."""
        spec, recorder = self._spec, self._recorder
        assert recorder is not None, "record_on must come before attend"
        item_bytes = spec.dtype.itemsize
        keys, values = (recorder.address(cache[:, layer_index]) for cache in (self._keys, self._values))
        block_bytes = self._keys.stride(0) * item_bytes
        nothing = recorder.positions
        recorder.add(
            store_kernel(spec.head_dim, spec.block_size, item_bytes, norms is not None),
            recorder.address(qkv),
            recorder.stride(qkv),
            recorder.address(rotation.cos),
            recorder.address(rotation.sin),
            recorder.stride(rotation.cos),
            recorder.slots,
            keys,
            values,
            recorder.address(norms.query_weight) if norms else nothing,
            recorder.address(norms.key_weight) if norms else nothing,
            float_bits(norms.eps if norms else 0.0),
            self._num_heads,
            spec.num_kv_heads,
            block_bytes,
        )
        output = recorder.buffer(self._num_heads * spec.head_dim)
        recorder.add(
            attention_kernel(self._shape, spec.block_size, item_bytes),
            recorder.address(qkv),
            recorder.stride(qkv),
            recorder.address(output),
            recorder.stride(output),
            keys,
            values,
            self._plan,
            self._partials,
            self._counters,
            self._scratch,
            recorder.block_tables,
            recorder.block_table_stride,
            spec.num_kv_heads,
            block_bytes,
        )
        return output

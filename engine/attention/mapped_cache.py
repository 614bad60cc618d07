"""The KV cache on a GPU: keys and values of each layer, each a region of its own, whose tails come and go.

`MappedCache` keeps every address for good and maps memory beneath as many blocks as there shall be; `PlainCache` is
of one size, for devices and drivers that cannot do that.  Both begin as zeros, since a NaN in an unused slot would
survive its zero weight.  Used by `engine.attention.triton_paged`; knows nothing of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.api.errors import InsufficientMemory
from engine.attention.backend import CacheSpec, no_room_for_cache
from engine.runner.device_arena import DeviceArena, MemoryDriver

SPARE_BYTES = 64 * 2**20
"""Left alone of the device's free memory: the driver's own tables of what is mapped where."""
_MOVED_AT_ONCE_BYTES = 64 * 2**20


class GpuCache(Protocol):
    """`keys` and `values` of each layer: [max_blocks, KV heads, block size, head_dim], contiguous."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    max_blocks: int

    @property
    def mapped_bytes(self) -> int:
        """See `AttentionBackend.mapped_bytes`."""
        ...

    @property
    def rounding_bytes(self) -> int:
        """See `AttentionBackend.rounding_bytes`."""
        ...

    def resize(self, num_blocks: int) -> int:
        """See `AttentionBackend.resize`."""
        ...


class PlainCache:
    """A cache of `num_blocks` from torch's allocator; its size is fixed."""

    mapped_bytes = 0
    rounding_bytes = 0

    def __init__(self, spec: CacheSpec, device: torch.device, num_blocks: int) -> None:
        shape = (spec.num_layers, num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        try:
            self.keys, self.values = (torch.zeros(shape, dtype=spec.dtype, device=device).unbind() for _ in range(2))
        except torch.cuda.OutOfMemoryError as error:
            raise no_room_for_cache(spec, num_blocks) from error
        self.max_blocks = num_blocks

    def resize(self, num_blocks: int) -> int:
        return self.max_blocks


class MappedCache:
    """Addresses for `max_blocks`, at first with memory for `num_blocks`.  Raises `InsufficientMemory`."""

    def __init__(self, spec: CacheSpec, driver: MemoryDriver, num_blocks: int, max_blocks: int) -> None:
        self._driver = driver
        self.max_blocks = max_blocks
        self._block_bytes = spec.bytes_per_block // (2 * spec.num_layers)  # of one region
        region_bytes = max_blocks * self._block_bytes
        self._regions = [DeviceArena(driver, region_bytes) for _ in range(2 * spec.num_layers)]
        self._granule_bytes = driver.granule_bytes
        # A region has a tensor only when there is memory at its front.
        self._grow(self._granule_bytes)
        self._bytes = [region.tensor() for region in self._regions]
        shape = (max_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        blocks = [region[:region_bytes].view(spec.dtype).view(shape) for region in self._bytes]
        self.keys, self.values = tuple(blocks[: spec.num_layers]), tuple(blocks[spec.num_layers :])
        self._num_blocks = 0
        self._extend(num_blocks)

    @property
    def mapped_bytes(self) -> int:
        return sum(region.mapped_bytes for region in self._regions)

    @property
    def rounding_bytes(self) -> int:
        return len(self._regions) * self._granule_bytes

    def resize(self, num_blocks: int) -> int:
        """See `AttentionBackend.resize`.  New memory is zeroed on the current stream."""
        num_blocks = min(num_blocks, self.max_blocks)
        if num_blocks > self._num_blocks:
            # What is asked for may have gone to another program meanwhile: what is left is better than nothing.
            free_granules = max(0, self._driver.free_bytes() - SPARE_BYTES) // self.rounding_bytes
            reachable = self._num_blocks_in(self._region_mapped_bytes + free_granules * self._granule_bytes)
            if reachable <= self._num_blocks:
                raise InsufficientMemory(
                    "The device has no free memory for a larger KV cache; stop other programs that use it, or give "
                    "models smaller shares."
                )
            self._extend(min(num_blocks, reachable))
        else:
            self._shrink(num_blocks)
        return self._num_blocks

    @property
    def _region_mapped_bytes(self) -> int:
        """All regions have the same."""
        return self._regions[0].mapped_bytes

    def _num_blocks_in(self, region_bytes: int) -> int:
        return min(self.max_blocks, region_bytes // self._block_bytes)

    def _extend(self, num_blocks: int) -> None:
        self._grow(num_blocks * self._block_bytes)
        start, end = self._num_blocks * self._block_bytes, self._region_mapped_bytes
        for region in self._bytes:
            region[start:end].zero_()
        self._num_blocks = num_blocks

    def _shrink(self, num_blocks: int) -> None:
        for region in self._regions:
            region.shrink_to(num_blocks * self._block_bytes)
        least_bytes = -(-num_blocks * self._block_bytes // self._granule_bytes) * self._granule_bytes
        is_exact = self._region_mapped_bytes == least_bytes
        self._num_blocks = num_blocks if is_exact else self._num_blocks_in(self._region_mapped_bytes)

    def _grow(self, region_bytes: int) -> None:
        before = [region.mapped_bytes for region in self._regions]
        try:
            for region in self._regions:
                region.grow_to(region_bytes)
        except InsufficientMemory:
            for region, mapped_bytes in zip(self._regions, before, strict=True):
                region.shrink_to(mapped_bytes)
            raise


def move_blocks(cache: GpuCache, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy whole blocks, all layers, keys and values, on the current stream; no target is a source."""
    device = cache.keys[0].device
    block_bytes = cache.keys[0][0].nbytes
    step = max(1, _MOVED_AT_ONCE_BYTES // block_bytes)
    for first in range(0, len(sources), step):
        moves = torch.tensor([sources[first : first + step], targets[first : first + step]], device=device)
        for region in (*cache.keys, *cache.values):
            region.index_copy_(0, moves[1], region.index_select(0, moves[0]))

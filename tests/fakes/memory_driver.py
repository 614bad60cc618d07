"""A `MemoryDriver` over this machine's memory: it checks every call, and poisons what comes and goes."""

from __future__ import annotations

import ctypes

import torch

from engine.api.errors import InsufficientMemory

POISON = 0xFF
"""As float16 or bfloat16 and float32: NaN."""


class FakeDriver:
    """A device with `total_bytes` in granules of `granule_bytes`; misuse is an assertion that fails."""

    def __init__(self, total_bytes: int, granule_bytes: int = 64) -> None:
        self.granule_bytes = granule_bytes
        self.total_bytes = total_bytes
        self.num_synchronized = 0
        self.most_pinned_bytes = 1 << 60
        self.pinned: dict[int, int] = {}
        self._ranges: dict[int, tuple[int, ctypes.Array[ctypes.c_char]]] = {}
        self._mapped: dict[int, int] = {}
        self._accessible: set[int] = set()

    @property
    def mapped_bytes(self) -> int:
        return sum(self._mapped.values())

    @property
    def num_ranges(self) -> int:
        return len(self._ranges)

    @property
    def piece_sizes(self) -> list[int]:
        return [self._mapped[address] for address in sorted(self._mapped)]

    def reserve(self, num_bytes: int) -> int:
        assert num_bytes > 0 and num_bytes % self.granule_bytes == 0
        memory = ctypes.create_string_buffer(bytes([POISON]) * (num_bytes + self.granule_bytes))
        address = -(-ctypes.addressof(memory) // self.granule_bytes) * self.granule_bytes
        self._ranges[address] = (num_bytes, memory)
        return address

    def free(self, address: int, num_bytes: int) -> None:
        assert self._ranges.pop(address)[0] == num_bytes
        assert not any(address <= mapped < address + num_bytes for mapped in self._mapped)

    def map_new(self, address: int, num_bytes: int) -> None:
        assert num_bytes > 0 and num_bytes % self.granule_bytes == 0
        assert any(start <= address and address + num_bytes <= start + size for start, size in self._reserved())
        for start, size in self._mapped.items():
            assert address + num_bytes <= start or start + size <= address, "mapped twice"
        if self.mapped_bytes + num_bytes > self.total_bytes:
            raise InsufficientMemory("The fake device is full; ask for less.")
        self._mapped[address] = num_bytes

    def allow_access(self, address: int, num_bytes: int) -> None:
        inside = {start for start in self._mapped if address <= start < address + num_bytes}
        assert sum(self._mapped[start] for start in inside) == num_bytes
        self._accessible |= inside

    def unmap(self, address: int, num_bytes: int) -> None:
        assert self._mapped.pop(address) == num_bytes
        self._accessible.discard(address)
        ctypes.memset(address, POISON, num_bytes)

    def free_bytes(self) -> int:
        return self.total_bytes - self.mapped_bytes

    def synchronize(self) -> None:
        self.num_synchronized += 1

    def pin(self, address: int, num_bytes: int) -> None:
        if sum(self.pinned.values()) + num_bytes > self.most_pinned_bytes:
            raise InsufficientMemory("The fake machine pins no more; ask for less.")
        assert address not in self.pinned
        self.pinned[address] = num_bytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        assert address in self._accessible, "no memory at the front"
        assert self._ranges[address][0] == num_bytes
        whole = (ctypes.c_uint8 * num_bytes).from_address(address)
        whole.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(whole, dtype=torch.uint8)

    def _reserved(self) -> list[tuple[int, int]]:
        return [(start, size) for start, (size, _) in self._ranges.items()]

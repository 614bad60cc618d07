"""`DeviceArena`: one address range for good, with as much memory beneath its front as is needed now.

Whoever holds the addresses, a kernel's argument in a captured graph say, need not know that the memory behind them
was given back and came again.  Memory comes in pieces that grow with the arena, since each costs the driver a few
calls; a piece is only given back whole.  Used for the KV cache (`engine.attention.mapped_cache`) and for weights
(`engine.runner.device_weights`); knows nothing of either.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

FINENESS = 16
"""A piece is at most one part in so many of the memory before it: what a shrink may keep too much of."""
MOST_PIECE_BYTES = 2**30


class MemoryDriver(Protocol):
    """Address ranges and memory of one device; sizes and addresses in bytes, multiples of `granule_bytes`.

    What takes something may raise an `EngineError`, and then took nothing.  What gives something back, or waits, only
    fails with a device that is lost; nobody handles that.
    """

    granule_bytes: int

    def reserve(self, num_bytes: int) -> int:
        """The first address of a range that has no memory yet."""
        ...

    def free(self, address: int, num_bytes: int) -> None:
        """Give a range back, beneath which there is no memory any more."""
        ...

    def map_new(self, address: int, num_bytes: int) -> None:
        """Put new memory of any content at `address`.  Raises `InsufficientMemory`."""
        ...

    def allow_access(self, address: int, num_bytes: int) -> None:
        """Let the device read and write what was mapped there.  Raises `InsufficientMemory`."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Give back what one `map_new` put there."""
        ...

    def free_bytes(self) -> int:
        """Memory of the device that nobody holds."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        ...

    def pin(self, address: int, num_bytes: int) -> None:
        """Keep host memory where it is, so that the device copies it at full speed.  Raises `InsufficientMemory`."""
        ...

    def unpin(self, address: int) -> None:
        """Let go what `pin` got with this address."""
        ...

    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        """uint8 [num_bytes] at `address`, whose first granule is mapped; keeps `owner` while it or a view lives."""
        ...


class DeviceArena:
    """Bytes 0 to `mapped_bytes` of `reserved_bytes` are there; it ends with its last reference and tensor."""

    def __init__(self, driver: MemoryDriver, num_bytes: int, *, least_piece_bytes: int = 0) -> None:
        """Room for `num_bytes`; pieces of at least `least_piece_bytes` where so much is asked for at once."""
        self._driver = driver
        self._least_piece_bytes = least_piece_bytes
        self.reserved_bytes = self._whole(max(1, num_bytes))
        self._address = driver.reserve(self.reserved_bytes)
        self._pieces: list[int] = []
        release = weakref.finalize(self, _release, driver, self._address, self.reserved_bytes, self._pieces)
        release.atexit = False  # The end of the process gives everything back.

    @property
    def mapped_bytes(self) -> int:
        return sum(self._pieces)

    def tensor(self) -> torch.Tensor:
        """The whole range, uint8 [reserved_bytes]; there must be memory at its front, and is only beneath that."""
        assert self._pieces, "an arena without memory has no tensor"
        return self._driver.tensor(self._address, self.reserved_bytes, self)

    def grow_to(self, num_bytes: int) -> None:
        """Have at least `num_bytes`, the new ones of any content.  Raises `InsufficientMemory` and changed nothing."""
        start, end = self.mapped_bytes, self._whole(num_bytes)
        assert end <= self.reserved_bytes, "an arena cannot grow beyond its addresses"
        if end <= start:
            return
        num_pieces, position = len(self._pieces), start
        try:
            while position < end:
                size = self._next_piece(position, end)
                self._driver.map_new(self._address + position, size)
                self._pieces.append(size)
                position += size
            self._driver.allow_access(self._address + start, end - start)
        except BaseException:
            self._drop(num_pieces)
            raise

    def shrink_to(self, num_bytes: int) -> None:
        """Give back every piece that lies wholly beyond `num_bytes`, once the device has done all it was asked."""
        kept, num_pieces = 0, 0
        while kept < num_bytes and num_pieces < len(self._pieces):
            kept += self._pieces[num_pieces]
            num_pieces += 1
        if num_pieces < len(self._pieces):
            self._driver.synchronize()
            self._drop(num_pieces)

    def unmap_all(self) -> None:
        """Give all memory back; the addresses stay."""
        self.shrink_to(0)

    def _whole(self, num_bytes: int) -> int:
        """So many bytes, rounded up to granules."""
        granule = self._driver.granule_bytes
        return -(-num_bytes // granule) * granule

    def _next_piece(self, position: int, end: int) -> int:
        granule = self._driver.granule_bytes
        share = max(position // FINENESS, self._least_piece_bytes) // granule * granule
        return min(max(share, granule), max(MOST_PIECE_BYTES, granule), end - position)

    def _drop(self, num_pieces: int) -> None:
        """Unmap the pieces after the first `num_pieces`, the last one first."""
        _unmap(self._driver, self._address, self._pieces, num_pieces)


def _unmap(driver: MemoryDriver, address: int, pieces: list[int], num_kept: int) -> None:
    position = sum(pieces)
    while len(pieces) > num_kept:
        position -= pieces[-1]
        driver.unmap(address + position, pieces[-1])
        pieces.pop()


def _release(driver: MemoryDriver, address: int, num_bytes: int, pieces: list[int]) -> None:
    driver.synchronize()
    _unmap(driver, address, pieces, 0)
    driver.free(address, num_bytes)

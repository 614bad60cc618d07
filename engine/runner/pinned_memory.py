"""`PinnedMemory`: gigabytes of this machine's RAM that a GPU copies to and from at the full speed of its bus.

Pinning takes longer than copying, so it is done in chunks: while one is pinned and filled, threads have the system
find the pages of the next ones.  torch's own pinned allocator rounds up to powers of two and keeps what is freed.
Used by `engine.runner.device_weights`, for as long as weights sleep.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import torch

from engine.api.errors import InsufficientMemory
from engine.host_memory import available_host_bytes
from engine.runner.device_arena import MemoryDriver

CHUNK_BYTES = 256 * 2**20
SPARE_BYTES = 2**30
"""RAM that is left alone."""
_NUM_THREADS = 4


class PinnedMemory:
    """Chunks of host memory, `num_bytes` together once `pinned` has been gone through."""

    def __init__(self, driver: MemoryDriver, num_bytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Takes no memory yet.  Raises `InsufficientMemory` where RAM has no room for it."""
        if num_bytes + SPARE_BYTES > available_host_bytes():
            raise _no_ram(num_bytes)
        self.num_bytes = num_bytes
        self._driver = driver
        self._chunk_bytes = chunk_bytes
        self._chunks: list[torch.Tensor] = []

    @property
    def chunks(self) -> tuple[torch.Tensor, ...]:
        """The pinned ones so far, uint8, in order."""
        return tuple(self._chunks)

    def pinned(self) -> Generator[torch.Tensor]:
        """Pin one chunk after the other.  Raises `InsufficientMemory`; whatever happens, `close` gives all back."""
        sizes = [
            min(self._chunk_bytes, self.num_bytes - start) for start in range(0, self.num_bytes, self._chunk_bytes)
        ]
        with (
            ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="pages") as threads,
            closing(_touched(threads, sizes)) as chunks,
        ):
            for chunk in chunks:
                self._driver.pin(chunk.data_ptr(), chunk.nbytes)
                self._chunks.append(chunk)
                yield chunk

    def close(self) -> None:
        """Give everything back; no copy may be under way."""
        while self._chunks:
            self._driver.unpin(self._chunks[-1].data_ptr())
            self._chunks.pop()


def _touched(threads: ThreadPoolExecutor, sizes: list[int]) -> Generator[torch.Tensor]:
    """New chunks of these sizes in order, whose pages are there; a few are prepared ahead."""
    waiting = deque(sizes)
    coming: deque[Future[torch.Tensor]] = deque()
    try:
        while waiting or coming:
            while waiting and len(coming) <= _NUM_THREADS:
                coming.append(threads.submit(_new_chunk, waiting.popleft()))
            yield coming.popleft().result()
    finally:
        for future in coming:
            future.cancel()


def _new_chunk(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of memory that the system has really given.  Raises `InsufficientMemory`."""
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    try:
        memory = mmap.mmap(-1, num_bytes, **flags)
    except OSError as error:
        raise _no_ram(num_bytes) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A page of 2 MiB is found, zeroed and pinned as one.
        memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)
    chunk.numpy()[:: mmap.PAGESIZE] = 0
    return chunk


def _no_ram(num_bytes: int) -> InsufficientMemory:
    return InsufficientMemory(
        f"This machine's RAM has no {num_bytes / 2**30:.1f} GiB free for the weights to sleep in; "
        "unload the model instead, or stop other programs."
    )

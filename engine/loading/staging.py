"""`Staging`: the buffers that file bytes pass through on their way to a device.

A GPU copies from pinned memory at the speed of its bus and without keeping the host waiting, from a
memory-mapped file at a fraction of that.  Here are the buffers, the stream the copies run on, and the
fences that say when a buffer may be filled again; what is read is `engine.loading.weight_stream`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch

PIECE_BYTES = 8 * 2**20
NUM_BUFFERS = 16


class Staging:
    """Ordinary memory and copies that are done when they return: a CPU's way, and the base of a GPU's.

    A context manager; on leaving, whatever happened, all copies are done and all buffers are freed.
    At most `num_buffers` of at most `piece_bytes` exist.
    """

    def __init__(self, device: torch.device, *, piece_bytes: int = PIECE_BYTES, num_buffers: int = NUM_BUFFERS) -> None:
        self.device = device
        self.piece_bytes = piece_bytes
        self.num_buffers = num_buffers
        self._buffers: list[torch.Tensor] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An exception under way keeps references to the buffers, but not to their memory.
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)
        self._buffers.clear()

    def new_buffer(self, num_bytes: int) -> torch.Tensor:
        """An uninitialised uint8 tensor [num_bytes] on the host, good until the context is left."""
        buffer = self._allocate(num_bytes)
        self._buffers.append(buffer)
        return buffer

    def fence(self) -> Callable[[], None]:
        """A function that waits, on any thread, for the copies enqueued up to now."""
        return lambda: None

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


class CudaStaging(Staging):
    """Pinned buffers, and a stream of its own that is current inside the context."""

    def __enter__(self) -> Self:
        # Memory of the destinations may still be in use by work enqueued before.
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        self._stream = stream
        self._entered = ExitStack()
        self._entered.enter_context(torch.cuda.stream(stream))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stream.synchronize()
        finally:
            self._entered.close()
            super().__exit__(kind, error, trace)
            # Both allocators would keep what was freed: pinned memory, and device memory tied to this stream.
            torch._C._host_emptyCache()
            torch.cuda.empty_cache()

    def fence(self) -> Callable[[], None]:
        # Blocking: a reader that waits sleeps instead of spinning on a core that another one needs.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event.synchronize

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def staging_for(device: torch.device) -> Staging | None:
    """None for a CPU, where the memory map itself is the fastest source."""
    return CudaStaging(device) if device.type == "cuda" else None

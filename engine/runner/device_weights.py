"""`DeviceWeights`: a model's parameters on a GPU, side by side in one arena, which sleep in this machine's RAM.

Asleep, the device has its memory back but the addresses stay, so captured graphs are good again after waking, which
is one copy at the speed of the bus.  Built before the model, whose loader fills it like any memory.
"""

from __future__ import annotations

import logging
import math
import threading
import time

import torch

from engine.runner.cuda_driver import cuda_driver_for
from engine.runner.device_arena import DeviceArena, MemoryDriver
from engine.runner.pinned_memory import CHUNK_BYTES, PinnedMemory

log = logging.getLogger(__name__)

ALIGNMENT_BYTES = 512
"""As torch's allocator aligns, which kernels rely on."""
_LEAST_PIECE_BYTES = CHUNK_BYTES


class DeviceWeights:
    """`WeightMemory` and `ParameterMemory` of one model on a GPU.  Raises `InsufficientMemory`.

    `expected_bytes` is what the parameters take, and `most_bytes` what they might together with their alignment; both
    are taken from the device as they are needed.
    """

    def __init__(
        self, driver: MemoryDriver, expected_bytes: int, most_bytes: int, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._driver = driver
        self._chunk_bytes = chunk_bytes
        self._arena = DeviceArena(driver, most_bytes, least_piece_bytes=_LEAST_PIECE_BYTES)
        self._arena.grow_to(max(1, expected_bytes))
        self._bytes = self._arena.tensor()
        self._used_bytes = 0
        self._kept_in: PinnedMemory | None = None
        self._waking_since = 0.0
        self._tidying: threading.Thread | None = None

    @property
    def mapped_bytes(self) -> int:
        return self._arena.mapped_bytes

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory for one parameter; it stays with the model.  Raises `InsufficientMemory`."""
        start = -(-self._used_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = start + math.prod(shape) * dtype.itemsize
        self._arena.grow_to(end)
        self._used_bytes = end
        return self._bytes[start:end].view(dtype).view(shape)

    def sleep(self) -> int:
        """See `WeightMemory.sleep`: copied to pinned memory while that is found, then unmapped."""
        if self._kept_in is not None:
            # Asleep, or called back while waking: what is in RAM is still the whole.
            self._driver.synchronize()
            self._arena.unmap_all()
            return self._kept_in.num_bytes
        self._finish_tidying()
        started = time.perf_counter()
        host = PinnedMemory(self._driver, self._used_bytes, chunk_bytes=self._chunk_bytes)
        try:
            start = 0
            for chunk in host.pinned():
                chunk.copy_(self._bytes[start : start + len(chunk)], non_blocking=True)
                start += len(chunk)
            self._driver.synchronize()
        except BaseException:
            self._driver.synchronize()
            host.close()
            raise
        self._arena.unmap_all()
        # Workspace of steps that will not come soon.
        torch.cuda.empty_cache()
        self._kept_in = host
        log.info("weights of %.2f GiB put to sleep in %.2f s", host.num_bytes / 2**30, time.perf_counter() - started)
        return host.num_bytes

    def wake(self) -> None:
        """See `WeightMemory.wake`: the copies are queued, chunk by chunk."""
        host = self._kept_in
        if host is None:
            return
        self._waking_since = time.perf_counter()
        self._arena.grow_to(self._used_bytes)
        start = 0
        for chunk in host.chunks:
            self._bytes[start : start + len(chunk)].copy_(chunk, non_blocking=True)
            start += len(chunk)

    def settle(self) -> None:
        """See `WeightMemory.settle`."""
        host = self._kept_in
        if host is None:
            return
        self._driver.synchronize()
        self._kept_in = None
        seconds = time.perf_counter() - self._waking_since
        log.info("weights of %.2f GiB woken in %.3f s", host.num_bytes / 2**30, seconds)
        # Giving gigabytes of pages back takes as long as a first token may.
        self._tidying = threading.Thread(target=host.close, name="pinned-memory", daemon=True)
        self._tidying.start()

    def _finish_tidying(self) -> None:
        if self._tidying is not None:
            self._tidying.join()
            self._tidying = None


def device_weights(device: torch.device, expected_bytes: int, most_bytes: int) -> DeviceWeights | None:
    """Memory for a model's parameters; None on a CPU, and where the driver maps none.  Raises `InsufficientMemory`."""
    driver = cuda_driver_for(device)
    return None if driver is None else DeviceWeights(driver, expected_bytes, most_bytes)

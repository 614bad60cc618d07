"""Host arrays to the device and back without waiting for it.

A copy from pinned memory is only queued, so the host goes on at once.  torch's pinned allocator
keeps a freed buffer until the copies queued on it have run, so nobody here counts buffers.
"""

from __future__ import annotations

import numpy as np
import torch


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of `values` on `device`; on the CPU it shares their memory."""
    host = torch.from_numpy(values)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class Download:
    """Tensors on their way to the host; `wait` returns them once they are there."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if not tensors or tensors[0].device.type == "cpu":
            self._on_host = tensors
            return
        self._on_host = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors
        )
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._on_host

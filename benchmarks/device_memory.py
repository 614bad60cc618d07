"""What a CUDA device holds while a benchmark runs, sampled from beside it.

The driver's own figure (through NVML, which neither synchronises nor disturbs a graph capture)
covers every process and what the allocator does not see; torch's figures say how much of it is
the allocator's.  Used by the scripts beside it.
"""

from __future__ import annotations

import threading
from types import ModuleType, TracebackType
from typing import Any

import torch

SAMPLE_INTERVAL_S = 0.05


class MemorySampler:
    """Within the `with` block, keeps the peak of the device's memory in use, in bytes."""

    def __init__(self, device: torch.device) -> None:
        import pynvml  # installed beside a CUDA build of torch only

        self._device = device
        self._nvml = pynvml
        self._handle = _nvml_handle(pynvml, device)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-sampler", daemon=True)
        self.before_bytes = self._used_bytes()
        self.peak_bytes = self.before_bytes

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._nvml.nvmlShutdown()

    def report(self, utilization: float) -> dict[str, Any]:
        """The peaks so far against the share of the device that the engine may use."""
        self._note()
        total_bytes = int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).total)
        budget_bytes = int(torch.cuda.get_device_properties(self._device).total_memory * utilization)
        own_bytes = self.peak_bytes - self.before_bytes
        return {
            "total_bytes": total_bytes,
            "budget_bytes": budget_bytes,
            "before_bytes": self.before_bytes,
            "peak_in_use_bytes": self.peak_bytes,
            "peak_of_this_run_bytes": own_bytes,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(self._device),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(self._device),
            "is_within_budget": own_bytes <= budget_bytes,
        }

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self._note()

    def _note(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._used_bytes())

    def _used_bytes(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)


def _nvml_handle(pynvml: ModuleType, device: torch.device) -> Any:
    """NVML numbers every device of the host; torch only those that this process may see."""
    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

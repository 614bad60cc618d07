"""`DeviceAccount`: what one engine may hold of its device, and what it does hold besides a KV cache.

A GPU's memory has three kinds of holder in a process: torch's allocator, the arenas whose memory is mapped
(`engine.runner.device_arena`), and the driver with its libraries, which nobody counts.  On a CPU it is the process.
Measured with `engine.runner.device`; made while an engine is built, for `engine.sizing` and `engine.encoder_sizing`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.api.config import EngineConfig
from engine.api.errors import InsufficientMemory
from engine.attention.backend import AttentionBackend
from engine.models.loadable import LoadableModel
from engine.runner import device as devices
from engine.runner.memory import GIB, MIB
from engine.runner.weight_memory import WeightMemory

MOST_DRIVER_BYTES = 768 * MIB
DRIVER_PART = 32
"""What a device is taken to have in use for the driver alone, at most, and at most one part in so many of it."""


class DeviceAccount:
    """Of one loaded model; `in_use_before` is `device_memory_in_use` from before this process touched the device."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadableModel,
        weights: WeightMemory,
        device: torch.device,
        in_use_before: int | None,
        attention: AttentionBackend | None = None,
    ) -> None:
        self.device = device
        self.weight_bytes = model.weight_bytes
        self._config = config
        self._model = model
        self._weights = weights
        self._attention = attention
        self._in_use_before = in_use_before
        self._outside_bytes = 0

    @property
    def budget_bytes(self) -> int:
        """What the engine may hold."""
        return devices.memory_budget_bytes(self._config, self.device)

    @property
    def held_weight_bytes(self) -> int:
        """The weights, with what granules of mapped memory add to them."""
        return max(self.weight_bytes, self._weights.mapped_bytes)

    @property
    def _mapped_bytes(self) -> int:
        return self._weights.mapped_bytes + (self._attention.mapped_bytes if self._attention is not None else 0)

    def bound_allocator(self) -> None:
        """See to it that a step that needs more than was measured fails, and takes no other's share.

        torch's allocator gets what the budget leaves beside what is mapped now.
        """
        if self.device.type == "cuda":
            allowed_bytes = max(0, self.budget_bytes - self._outside_bytes - self._mapped_bytes)
            share = min(1.0, allowed_bytes / devices.total_memory_bytes(self.device))
            torch.cuda.set_per_process_memory_fraction(share, self.device)

    def workspace_peak_bytes(self, num_tokens: int, run_largest_step: Callable[[], None]) -> int:
        """What a GPU's allocator holds for a step of `num_tokens`.  Raises `InsufficientMemory`."""
        try:
            return devices.workspace_peak_bytes(self.device, run_largest_step)
        except torch.cuda.OutOfMemoryError as error:
            raise InsufficientMemory(
                f"There is no memory for a step of {num_tokens:,} tokens beside the weights of "
                f"{self.weight_bytes / GIB:.2f} GiB; choose a smaller model, or stop other programs that use the "
                "device."
            ) from error

    def allocated_bytes(self) -> int:
        """What the engine has taken from a GPU's allocator by now, its weights not counted."""
        from_allocator = 0 if self._weights.mapped_bytes else self.weight_bytes
        return torch.cuda.memory_allocated(self.device) - from_allocator

    def measure_outside(self) -> int:
        """What the process holds of a GPU besides allocator and arenas; remembered as long as the engine lives."""
        before = self._in_use_before
        outside = devices.measure_outside_bytes(self.device, before, mapped_bytes=self._mapped_bytes)
        # What is in use on a device that nobody uses is the driver's own, and part of what others see in use.
        most = min(MOST_DRIVER_BYTES, devices.total_memory_bytes(self.device) // DRIVER_PART)
        self._outside_bytes = outside + min(before or 0, most)
        return self._outside_bytes

    def reachable_bytes(self) -> int | None:
        """What this process could hold now, with what is free; None on a CPU."""
        return devices.reachable_memory_bytes(self.device, self._outside_bytes, self._mapped_bytes)

    def held_bytes(self) -> int:
        """What the process holds of its device now; on a CPU without the weights, which are RAM wherever they are."""
        if self.device.type == "cuda":
            return devices.held_memory_bytes(self.device, self._outside_bytes, self._mapped_bytes)
        in_files = sum(file.num_bytes for file in self._model.weight_maps)
        return max(0, devices.own_memory_bytes() - max(0, self.weight_bytes - in_files))

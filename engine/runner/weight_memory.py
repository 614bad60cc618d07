"""`WeightMemory`: what a model's weights do when their engine sleeps and wakes.

Built with the model, driven by `engine.holdings`.  On a GPU `engine.runner.device_weights` moves them to this machine's
RAM and back, to the same addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.api.errors import EngineError
from engine.loading.mapped_file import MappedFile


class WeightMemory(Protocol):
    """The memory of one model's weights; asleep, nothing may read them."""

    @property
    def mapped_bytes(self) -> int:
        """What it holds of the device now that torch's allocator knows nothing of."""
        ...

    def sleep(self) -> int:
        """Give the device's memory back as far as possible; returns what is kept in this machine's RAM, in bytes.

        No step may be in flight.  Raises `InsufficientMemory` where RAM does not suffice, and then changed nothing.
        """
        ...

    def wake(self) -> None:
        """Have the weights where they were, ready for work on the current stream; `settle` must follow, or `sleep`.

        Nothing changes for weights that are awake.  Raises `InsufficientMemory` where the device's memory does not
        suffice; they stay asleep then.
        """
        ...

    def settle(self) -> None:
        """Wait until a wake is complete, and let go what was kept for it."""
        ...


@dataclass(frozen=True, slots=True)
class LastingWeights:
    """Weights that stay where they are: those of a CPU, whose memory is what others would sleep in.

    Only what is mapped from a file leaves: the system reads it anew when it is next used.
    """

    num_bytes: int
    maps: tuple[MappedFile, ...] = ()

    @property
    def mapped_bytes(self) -> int:
        return 0

    def sleep(self) -> int:
        for file in self.maps:
            file.release(0, file.num_bytes)
        return max(0, self.num_bytes - sum(file.num_bytes for file in self.maps))

    def wake(self) -> None:
        """They never left."""

    def settle(self) -> None:
        """Nothing is under way."""


class SleeplessWeights:
    """Weights that torch's allocator holds, on a GPU whose driver maps no memory under fixed addresses."""

    mapped_bytes = 0

    def sleep(self) -> int:
        raise EngineError(
            "The model cannot sleep, because this NVIDIA driver does not map memory under fixed addresses; "
            "update the driver, or unload the model instead."
        )

    def wake(self) -> None:
        """They never left."""

    def settle(self) -> None:
        """Nothing is under way."""

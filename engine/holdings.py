"""`Holdings`: what an engine holds of memory, and whether it sleeps: the same for every kind of engine.

Keeps what is said of a sleep true, whatever fails on the way there or back.  Used by `engine.loop` and
`engine.encoder_loop`, which know what else must go and come with the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.api.errors import EngineAsleep
from engine.api.wire import WorkerMemory
from engine.runner.weight_memory import WeightMemory


class Holdings:
    """An awake engine holds `fixed_bytes` of its device besides its cache, a sleeping one what `measure` finds."""

    def __init__(self, weights: WeightMemory, fixed_bytes: int, measure: Callable[[], int]) -> None:
        self._weights = weights
        self._fixed_bytes = fixed_bytes
        self._measure = measure
        self._host_bytes = 0
        self.is_asleep = False

    def require_awake(self) -> None:
        """Raises `EngineAsleep`."""
        if self.is_asleep:
            raise EngineAsleep("The model is asleep; wake it first.")

    def sleep(self) -> None:
        """Let the weights leave the device; no step may be in flight.

        Raises `InsufficientMemory` where RAM has no room for them, and then changed nothing.
        """
        self._host_bytes = self._weights.sleep()
        self.is_asleep = True

    @contextmanager
    def waking(self) -> Iterator[None]:
        """Bring the weights back, while the block brings back what else is needed.

        Their copies may be under way until the end of the block, and are complete after it.  Raises
        `InsufficientMemory`; then, and after any error in the block, the engine sleeps on.
        """
        self._weights.wake()
        try:
            yield
        except BaseException:
            self._weights.sleep()
            raise
        self._weights.settle()
        self.is_asleep, self._host_bytes = False, 0

    def memory(self, *, num_kv_blocks: int, max_model_len: int) -> WorkerMemory:
        """What is held now, with a cache of `num_kv_blocks` while awake."""
        return WorkerMemory(
            num_kv_blocks=0 if self.is_asleep else num_kv_blocks,
            max_model_len=max_model_len,
            fixed_bytes=self._measure() if self.is_asleep else self._fixed_bytes,
            host_bytes=self._host_bytes,
            is_asleep=self.is_asleep,
        )

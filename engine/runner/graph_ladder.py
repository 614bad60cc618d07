"""CUDA graphs of one kind of step, captured for the sizes that really occur.

A step of a small model is hundreds of kernels of a few microseconds; a graph launches them as one.
Steps are padded to the next size of a fixed ladder.  A size that comes up without a graph runs kernel by
kernel, and is captured while nothing else is to be done, or on the spot when it keeps coming up: a first
token never waits for a capture.  Used by `engine.runner.captured_steps`; knows nothing of what
the captured function computes.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)

Outputs = tuple[torch.Tensor, torch.Tensor]
Forward = Callable[[torch.Tensor, int], Outputs]
"""(input int32 [n] on the device, size) -> the step's outputs."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    outputs: Outputs

    def replay(self, host: torch.Tensor) -> Outputs:
        self.inputs.copy_(host, non_blocking=True)
        self.graph.replay()
        return self.outputs


class GraphLadder:
    """Graphs of one function for a ladder of sizes.

    `name` is for the log; `pool` is a `torch.cuda.graph_pool_handle`; `forward` is what is captured;
    `idle_input` gives, for a size, an input that is valid and changes nothing.  `patience` is how many steps of
    a size run without a graph before one is captured on the spot; None leaves that to quiet moments.  Outputs
    lie in buffers that the next replay overwrites: use them on the current stream before it.
    """

    def __init__(
        self,
        name: str,
        ladder: Sequence[int],
        forward: Forward,
        idle_input: Callable[[int], np.ndarray],
        device: torch.device,
        pool: Any,
        *,
        patience: int | None,
    ) -> None:
        self.name = name
        self._ladder = sorted(ladder)
        self._forward = forward
        self._idle_input = idle_input
        self._device = device
        self._pool = pool
        self._patience = patience
        self._captured: dict[int, _Captured] = {}
        self._uses: dict[int, int] = {}
        self._wanted: set[int] = set()
        self._is_full = False
        self.on_capture: Callable[[int], None] = lambda size: None

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """The sizes that have a graph, in the order of their capture."""
        return tuple(self._captured)

    @property
    def default_sizes(self) -> list[int]:
        """What is worth capturing before anything is known: every size up to 16 times the smallest."""
        return [size for size in self._ladder if size <= 16 * self._ladder[0]]

    @property
    def has_wanted(self) -> bool:
        """Whether `capture_wanted` has anything left to do."""
        return bool(self._wanted)

    def want(self, sizes: Iterable[int]) -> None:
        """Sizes worth capturing before they come up again; those not on the ladder are ignored."""
        self._wanted |= set(sizes) & set(self._ladder) - set(self._captured)

    def capture_wanted(self) -> None:
        """Capture the largest wanted size, whose memory serves the smaller ones too; some tens of milliseconds."""
        size = max(self._wanted)
        self._wanted.discard(size)
        self._capture(size)

    def size_for(self, count: int) -> int | None:
        """The size that `count` is padded to; None when it is beyond the ladder."""
        place = bisect_left(self._ladder, count)
        return self._ladder[place] if place < len(self._ladder) else None

    def run(self, size: int, fill: Callable[[np.ndarray], None]) -> Outputs | None:
        """Replay the graph of `size` on the input that `fill` writes; None while there is no graph."""
        captured = self._captured.get(size)
        if captured is None:
            captured = self._capture_if_due(size)
            if captured is None:
                return None
        host = torch.empty(captured.inputs.shape, dtype=torch.int32, pin_memory=True)
        fill(host.numpy())
        return captured.replay(host)

    def _capture_if_due(self, size: int) -> _Captured | None:
        """Note that `size` came up without a graph, and capture it once that has happened too often."""
        if self._is_full:
            return None
        uses = self._uses[size] = self._uses.get(size, 0) + 1
        self._wanted.add(size)
        if self._patience is None or uses <= self._patience:
            return None
        self._wanted.discard(size)
        return self._capture(size)

    def _capture(self, size: int) -> _Captured | None:
        """Capture `size`; None when memory does not suffice, and then no more is tried."""
        started = time.perf_counter()
        inputs = torch.from_numpy(self._idle_input(size)).to(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            # Once outside the graph, so that libraries load and kernels compile.
            self._forward(inputs, size)
            torch.cuda.synchronize(self._device)
            with _no_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = self._forward(inputs, size)
        except torch.cuda.OutOfMemoryError:
            log.warning("No memory for the graph of %s %d; such steps go on without one.", self.name, size)
            self._is_full = True
            self._wanted.clear()
            return None
        captured = self._captured[size] = _Captured(graph, inputs, outputs)
        milliseconds = 1e3 * (time.perf_counter() - started)
        log.info("captured the graph of %s %d in %.0f ms", self.name, size, milliseconds)
        self.on_capture(size)
        return captured


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected: another engine's graphs may be part of it, and to end one is not allowed meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

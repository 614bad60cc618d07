"""CUDA graphs of the decode step, captured for the batch sizes that really occur.

A decode step of a small model is hundreds of kernels of a few microseconds; a graph launches them as
one.  Batches are padded to the next size of a fixed ladder.  A size is captured when it comes up for the
second time, so the first token never waits for a capture, or ahead of time, while nothing else is to be
done, when it was used in an earlier life of the model.  Called by `engine.runner.model_runner`; knows
nothing of what the captured function computes.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

log = logging.getLogger(__name__)

LADDER = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_USES_BEFORE_CAPTURE = 2
_ROW, _START, _NUM_TOKENS, _FIRST = range(4)
_PADDING_ROW = -1

Forward = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""`sequences` int32 [4, S] on the device -> logits [S, V] and the likeliest ids [S], one token of each sequence."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    sequences: torch.Tensor
    logits: torch.Tensor
    token_ids: torch.Tensor

    def replay(self, table: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        count = table.shape[1]
        host = torch.empty(self.sequences.shape, dtype=torch.int32, pin_memory=True)
        padded = host.numpy()
        padded[:, :count] = table
        padded[:, count:] = np.array([_PADDING_ROW, 0, 1, 0])[:, None]
        padded[_FIRST] = np.arange(padded.shape[1])
        self.sequences.copy_(host, non_blocking=True)
        self.graph.replay()
        return self.logits[:count], self.token_ids[:count]


class DecodeGraphs:
    """Runs decode batches of one model, through a graph where there is one.

    Results lie in buffers that the next call overwrites: use them on the current stream before it.
    """

    def __init__(self, forward: Forward, device: torch.device, *, max_size: int) -> None:
        self._forward = forward
        self._device = device
        self._ladder = self.ladder(max_size)
        self.on_capture: Callable[[int], None] = lambda size: None
        self._captured: dict[int, _Captured] = {}
        self._uses: dict[int, int] = {}
        self._wanted: list[int] = []
        self._pool = torch.cuda.graph_pool_handle()

    @staticmethod
    def ladder(max_size: int) -> list[int]:
        """The sizes that batches of up to `max_size` sequences are padded to."""
        return [size for size in LADDER if size < max_size] + [min(max_size, LADDER[-1])]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes captured so far, in the order of their capture."""
        return tuple(self._captured)

    @property
    def has_wanted(self) -> bool:
        """Whether `capture_wanted` has anything left to do."""
        return bool(self._wanted)

    def want(self, sizes: Iterable[int]) -> None:
        """Sizes worth capturing before they come up; the largest first, whose memory serves the others too."""
        self._wanted = sorted({size for size in sizes if size in self._ladder} - set(self._captured))

    def capture_wanted(self) -> None:
        """Capture one of the wanted sizes; some tens of milliseconds."""
        size = self._wanted.pop()
        if size not in self._captured:
            self._capture(size)

    def run(self, table: np.ndarray) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Decode the sequences of `table` int32 [4, S]; None when the batch needs no graph or has none yet."""
        place = bisect_left(self._ladder, table.shape[1])
        if place == len(self._ladder):
            return None
        size = self._ladder[place]
        captured = self._captured.get(size)
        if captured is None:
            uses = self._uses[size] = self._uses.get(size, 0) + 1
            if uses < _USES_BEFORE_CAPTURE:
                return None
            captured = self._capture(size)
        return captured.replay(table)

    def _capture(self, size: int) -> _Captured:
        started = time.perf_counter()
        sequences = torch.zeros((4, size), dtype=torch.int32, device=self._device)
        sequences[_ROW] = _PADDING_ROW
        sequences[_NUM_TOKENS] = 1
        sequences[_FIRST] = torch.arange(size, dtype=torch.int32, device=self._device)
        # Once outside the graph, so that libraries load and kernels compile; padding alone changes no state.
        self._forward(sequences)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits, token_ids = self._forward(sequences)
        captured = self._captured[size] = _Captured(graph, sequences, logits, token_ids)
        log.info("captured the decode graph for %d sequences in %.0f ms", size, 1e3 * (time.perf_counter() - started))
        self.on_capture(size)
        return captured

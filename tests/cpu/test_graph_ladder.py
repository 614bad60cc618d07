"""When a graph ladder captures: in quiet moments, or on the spot once a size keeps coming up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.core.step_sizes import DECODE_SIZES, decode_sizes
from engine.runner.graph_ladder import GraphLadder


class RecordingLadder(GraphLadder):
    """Notes what it is asked to capture, and never has the memory for it."""

    def __init__(self, *, patience: int | None, is_full: bool = False) -> None:
        super().__init__(
            "steps", (1, 2, 4, 8, 32), _unused, _unused_input, torch.device("cpu"), pool=None, patience=patience
        )
        self._is_full = is_full
        self.asked: list[int] = []

    def _capture(self, size: int) -> None:
        self.asked.append(size)


def _unused(inputs: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("nothing is captured here")


def _unused_input(size: int) -> np.ndarray:
    raise AssertionError("nothing is captured here")


def _no_fill(inputs: np.ndarray) -> None:
    raise AssertionError("there is no graph to fill")


def test_a_count_is_padded_to_the_next_size() -> None:
    ladder = RecordingLadder(patience=None)
    assert [ladder.size_for(count) for count in (1, 2, 3, 8, 9, 32, 33)] == [1, 2, 4, 8, 32, 32, None]


def test_patience_runs_out_on_the_spot() -> None:
    ladder = RecordingLadder(patience=3)
    for uses in range(1, 6):
        assert ladder.run(4, _no_fill) is None
        assert ladder.asked == [4] * max(0, uses - 3)


def test_without_a_limit_to_patience_sizes_wait_for_a_quiet_moment() -> None:
    ladder = RecordingLadder(patience=None)
    for size in (2, 8, 2, 4, 2):
        assert ladder.run(size, _no_fill) is None
    assert ladder.asked == []
    while ladder.has_wanted:
        ladder.capture_wanted()
    assert ladder.asked == [8, 4, 2]


def test_only_sizes_of_the_ladder_are_wanted() -> None:
    ladder = RecordingLadder(patience=None)
    ladder.want((3, 8, 1000))
    ladder.capture_wanted()
    assert (ladder.asked, ladder.has_wanted) == ([8], False)


def test_without_memory_nothing_more_is_tried() -> None:
    ladder = RecordingLadder(patience=0, is_full=True)
    assert ladder.run(4, _no_fill) is None
    assert (ladder.asked, ladder.has_wanted) == ([], False)


@pytest.mark.parametrize(("max_num_seqs", "expected"), [(1, [1]), (3, [1, 2, 3]), (256, list(DECODE_SIZES))])
def test_decode_sizes_end_with_the_largest_batch(max_num_seqs: int, expected: list[int]) -> None:
    assert decode_sizes(max_num_seqs) == expected


def test_batches_beyond_the_ladder_have_no_size() -> None:
    assert decode_sizes(512) == list(DECODE_SIZES)

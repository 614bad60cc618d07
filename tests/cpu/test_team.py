"""Threads that run a program together: all of the work, once, in order, waiting for no thread without a core."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from engine.cpu.code_cache import FOLDER_VARIABLE
from engine.cpu.kernel import Body, Kernel
from engine.cpu.memory import claim, int64s, read_arguments
from engine.cpu.program import Capacity, Program, Recorder, Rows
from engine.cpu.step import STEP_SIZE
from engine.cpu.team import Team

NUM_PIECES = 16


def fold() -> Body:
    """Piece i becomes 3 · (what it was) + (piece before it, as the last instruction left it) + 1."""

    def kernel(arguments, step, rank, size):
        source, target = read_arguments(arguments, 2)
        before, after = int64s(source, NUM_PIECES), int64s(target, NUM_PIECES)
        piece = claim(arguments)
        while piece < NUM_PIECES:
            after[piece] = 3 * before[piece] + before[piece - 1] + 1
            piece = claim(arguments)

    return kernel


FOLD = Kernel(__name__, "fold")


@pytest.fixture(autouse=True, scope="module")
def own_code_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The shared one does not know when this file's kernel changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("code")))
        yield


def record(length: int) -> tuple[Program, np.ndarray]:
    """A program of `length` instructions each of which reads what the one before wrote, and its memory."""
    recorder = Recorder(Capacity(4, 4, 4), Rows(0, 0, 0, 0), 1)
    places = [recorder.workspace(8 * NUM_PIECES) for _ in range(2)]
    for index in range(length):
        recorder.add(FOLD, places[index % 2], places[(index + 1) % 2])
    last = (ctypes.c_int64 * NUM_PIECES).from_address(places[length % 2])
    return recorder.finish(), np.ctypeslib.as_array(last)


def expected(length: int, values: np.ndarray) -> np.ndarray:
    for _ in range(length):
        values = 3 * values + np.roll(values, 1) + 1
    return values


STEP = np.zeros(STEP_SIZE, dtype=np.int64)


@pytest.mark.parametrize("spins", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_piece_is_computed_once_and_in_order(size, spins):
    program, last = record(30)
    team = Team(size, spins=spins)
    values = last.copy()
    for _ in range(50):
        program.run(team, STEP)
        with np.errstate(over="ignore"):
            values = expected(30, values)
        assert np.array_equal(last, values)
    team.close()


def test_work_goes_on_without_the_threads_that_get_no_core():
    program, last = record(10)
    team = Team(4)
    team._meeting.wake = []
    program.run(team, STEP)
    assert np.array_equal(last, expected(10, np.zeros(NUM_PIECES, dtype=np.int64)))


def test_a_thread_that_comes_too_late_changes_nothing():
    program, last = record(10)
    team = Team(2)
    (wake,), team._meeting.wake = team._meeting.wake, []
    program.run(team, STEP)
    late = last.copy()
    wake.release()
    while wake.acquire(blocking=False):
        wake.release()
        time.sleep(0.001)
    assert np.array_equal(last, late)
    team._meeting.wake = [wake]
    program.run(team, STEP)
    assert np.array_equal(last, expected(10, late))


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_threads_end_with_their_team(how):
    before = set(threading.enumerate())
    team = Team(3)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    if how == "closed":
        team.close()
    del team
    for helper in helpers:
        helper.join(timeout=10)
        assert not helper.is_alive()


def test_cycles_are_counted_for_each_instruction():
    program, _ = record(5)
    program.cycles = np.zeros(5, dtype=np.int64)
    program.run(Team(1), STEP)
    assert (program.cycles > 0).all()

"""`Team`: threads that run a program together.

An instruction is done when all pieces of its work are claimed and nobody is inside its kernel any more; who
finds that out moves the team on.  So a thread that has no core at the moment, because another program uses it,
delays nobody: it joins at the instruction the others have come to, and at worst one claimed piece waits for it.
Between programs the threads sleep, so an idle engine costs no CPU.  Within one, those that wait for a claimed
piece spin, since that takes microseconds, and give way after a while.  There is no pause instruction in the spin:
under a hypervisor that watches for it, each wait cost 30 microseconds.

Used by `engine.cpu.program`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numba
import numpy as np

from engine.cpu.memory import (
    call_kernel,
    compare_exchange,
    fetch_add,
    give_way,
    int64s,
    load_shared,
    read_cycles,
)

PROGRAM_COLUMNS = 2
"""An instruction is the address of its kernel and that of its arguments."""
CLAIMED, INSIDE = 0, 15
"""Of an instruction's arguments: how many pieces of work are claimed, and how many threads run its kernel."""

_CURRENT, _OPEN, _MEMBERS, _SHARED_NUMBERS = 0, 8, 16, 24
"""What the threads share, on a cache line each: the instruction they are at, which program runs (0: none), and how
many threads beside the first are in it."""

LONG_PATIENCE = 20_000
"""How often a thread that spins looks before it gives way after all: some tens of microseconds."""
SHORT_PATIENCE = 100


def _run(program, count, step, shared, patience, cycles, rank, size):
    """Run the instructions that are left, as thread `rank` of `size`.

    A waiting thread looks `patience` times before it gives way.  Where `cycles` is not 0, the first thread adds what
    each instruction took, waiting included, to int64s there.
    """
    instructions = int64s(program, (count, PROGRAM_COLUMNS))
    current = shared + 8 * _CURRENT
    is_timing = cycles != 0 and rank == 0
    started = read_cycles() if is_timing else 0
    index = load_shared(current)
    while index < count:
        arguments = instructions[index, 1]
        inside = arguments + 8 * INSIDE
        fetch_add(inside, 1)
        call_kernel(instructions[index, 0], arguments, step, rank, size)
        fetch_add(inside, -1)
        looks = 0
        # A kernel returns when all is claimed, and whoever claims is inside.
        while load_shared(inside) > 0 and load_shared(current) == index:
            looks += 1
            if looks == patience:
                give_way()
                looks = 0
        compare_exchange(current, index, index + 1)
        if is_timing:
            now = read_cycles()
            int64s(cycles, count)[index] += now - started
            started = now
        index = load_shared(current)


def _join(program, count, step, shared, patience, turn, rank, size):
    """Help with program number `turn`, unless it is over."""
    members = shared + 8 * _MEMBERS
    fetch_add(members, 1)
    if load_shared(shared + 8 * _OPEN) == turn:
        _run_compiled(program, count, step, shared, patience, 0, rank, size)
    fetch_add(members, -1)


def _lead(program, count, step, shared, patience, turn, cycles, size):
    """Run program number `turn` as the first thread; returns when nobody is in it any more."""
    numbers = int64s(shared, _SHARED_NUMBERS)
    numbers[_CURRENT] = 0
    fetch_add(shared + 8 * _OPEN, turn)
    _run_compiled(program, count, step, shared, patience, cycles, 0, size)
    fetch_add(shared + 8 * _OPEN, -turn)
    looks = 0
    while load_shared(shared + 8 * _MEMBERS) > 0:
        looks += 1
        if looks == patience:
            give_way()
            looks = 0


_run_compiled = numba.njit(_run)


class Team:
    """`size` threads, the caller's among them.

    `spins`: whether those that wait keep their core.  `cpus` pins each to one CPU, where the system allows that.
    """

    def __init__(self, size: int, *, spins: bool = True, cpus: Sequence[int] = ()) -> None:
        self.size = size
        self._patience = LONG_PATIENCE if spins else SHORT_PATIENCE
        self._shared = np.zeros(_SHARED_NUMBERS, dtype=np.int64)
        self._turn = 0
        compiled = numba.njit(nogil=True, cache=bool(numba.config.CACHE_DIR))
        self._lead = compiled(_lead)
        self._join = compiled(_join)
        self._job: tuple[int, ...] | None = None
        self._wake = [threading.Semaphore(0) for _ in range(1, size)]
        if cpus:
            _pin(cpus[0])
        for rank in range(1, size):
            cpu = cpus[rank % len(cpus)] if cpus else None
            threading.Thread(target=self._help, args=(rank, cpu), name=f"team-{rank}", daemon=True).start()

    def run(self, program: np.ndarray, step: np.ndarray, cycles: np.ndarray | None = None) -> None:
        """Run a program, int64 [instructions, 2], on a step's numbers; returns when it is done.

        No piece of its work may be claimed yet.  Adds the cycles that each instruction took to `cycles` int64
        [instructions].  One program at a time.
        """
        self._turn += 1
        shared = self._shared.ctypes.data
        job = (program.ctypes.data, len(program), step.ctypes.data, shared, self._patience, self._turn)
        self._job = job
        for wake in self._wake:
            wake.release()
        self._lead(*job, 0 if cycles is None else cycles.ctypes.data, self.size)

    def close(self) -> None:
        """Let the threads end."""
        self._job = None
        for wake in self._wake:
            wake.release()

    def _help(self, rank: int, cpu: int | None) -> None:
        if cpu is not None:
            _pin(cpu)
        wake = self._wake[rank - 1]
        while True:
            wake.acquire()
            job = self._job
            if job is None:
                return
            self._join(*job, rank, self.size)


def _pin(cpu: int) -> None:
    """Keep the calling thread on one CPU."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, (cpu,))

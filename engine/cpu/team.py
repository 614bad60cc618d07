"""`Team`: threads that run a program together.

An instruction is done when all pieces of its work are claimed and nobody is inside its kernel any more; who
finds that out moves the team on.  So a thread that has no core at the moment, because another program uses it,
delays nobody: it joins at the instruction the others have come to, and at worst one claimed piece waits for it.
Between programs the threads sleep, so an idle engine costs no CPU.  Within one, those that wait for a claimed
piece spin, since that takes microseconds, and give way after a while.  There is no pause instruction in the spin:
under a hypervisor that watches for it, each wait cost 30 microseconds.

`engine.cpu.team_loop` is what the threads run, without the interpreter's lock.  Used by `engine.cpu.program`.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from engine.cpu.catalogue import join_kernel, lead_kernel
from engine.cpu.code_cache import kernel_address

PROGRAM_COLUMNS = 2
"""An instruction is the address of its kernel and that of its arguments."""
CLAIMED, INSIDE = 0, 15
"""Of an instruction's arguments: how many pieces of work are claimed, and how many threads run its kernel."""

CURRENT, OPEN, MEMBERS, SHARED_NUMBERS = 0, 8, 16, 24
"""What the threads share, on a cache line each: the instruction they are at, which program runs (0: none), and how
many threads beside the first are in it."""

LONG_PATIENCE = 20_000
"""How often a thread that spins looks before it gives way after all: some tens of microseconds."""
SHORT_PATIENCE = 100

_LOOP = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)


class _Meeting:
    """What a team's threads hold: not the team itself, so that they end when nobody needs it any more."""

    def __init__(self, num_helpers: int) -> None:
        self.numbers = np.zeros(SHARED_NUMBERS, dtype=np.int64)
        self.job: tuple[int, ...] | None = None
        self.wake = [threading.Semaphore(0) for _ in range(num_helpers)]

    def call(self, job: tuple[int, ...] | None) -> None:
        """Wake all helpers for a job; None ends them."""
        self.job = job
        for wake in self.wake:
            wake.release()


class Team:
    """`size` threads, the caller's among them.

    `spins`: whether those that wait keep their core.  `cpus` pins each to one CPU, where the system allows that.
    `code_folder` keeps the compiled loop between starts.
    """

    def __init__(
        self, size: int, *, spins: bool = True, cpus: Sequence[int] = (), code_folder: Path | None = None
    ) -> None:
        self.size = size
        self._patience = LONG_PATIENCE if spins else SHORT_PATIENCE
        self._turn = 0
        self._lead = _LOOP(kernel_address(lead_kernel(), code_folder))
        join = _LOOP(kernel_address(join_kernel(), code_folder))
        self._meeting = _Meeting(size - 1)
        self._finalizer = weakref.finalize(self, self._meeting.call, None)
        if cpus:
            _pin(cpus[0])
        for rank in range(1, size):
            cpu = cpus[rank % len(cpus)] if cpus else None
            arguments = self._meeting, self._meeting.wake[rank - 1], join, rank, size, cpu
            threading.Thread(target=_help, args=arguments, name=f"team-{rank}", daemon=True).start()

    def run(self, program: np.ndarray, step: np.ndarray, cycles: np.ndarray | None = None) -> None:
        """Run a program, int64 [instructions, 2], on a step's numbers; returns when it is done.

        No piece of its work may be claimed yet.  Adds the cycles that each instruction took to `cycles` int64
        [instructions].  One program at a time.
        """
        self._turn += 1
        shared = self._meeting.numbers.ctypes.data
        job = (program.ctypes.data, len(program), step.ctypes.data, shared, self._patience, self._turn)
        self._meeting.call(job)
        self._lead(*job, 0 if cycles is None else cycles.ctypes.data, self.size)

    def close(self) -> None:
        """Let the threads end."""
        self._finalizer()


def _help(
    meeting: _Meeting, wake: threading.Semaphore, join: Callable[..., None], rank: int, size: int, cpu: int | None
) -> None:
    if cpu is not None:
        _pin(cpu)
    while True:
        wake.acquire()
        job = meeting.job
        if job is None:
            return
        join(*job, rank, size)


def _pin(cpu: int) -> None:
    """Keep the calling thread on one CPU."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, (cpu,))

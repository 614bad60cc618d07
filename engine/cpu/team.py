"""`Team`: threads that run a program together, each instruction by all of them, a barrier after each.

Between programs the threads sleep, so an idle engine costs no CPU.  Within one they wait by spinning, since
an instruction takes microseconds; a thread that waits long gives way, because on a busy machine it may be
waiting for a thread that has no processor.  There is no pause instruction in the spin: under a hypervisor that
watches for it, each wait cost 30 microseconds.  Used by `engine.runner.recorded_steps`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numba
import numpy as np

from engine.cpu.memory import call_kernel, fetch_add, give_way, int64s, load_shared, read_cycles

PROGRAM_COLUMNS = 2
"""An instruction is the address of its kernel and that of its arguments."""
LONG_PATIENCE = 20_000
"""How often a thread that spins looks before it gives way after all: some tens of microseconds."""
SHORT_PATIENCE = 100


def _run(program, count, step, arrivals, before, patience, cycles, rank, size):
    """Run `count` instructions as thread `rank` of `size`.

    `before` are the arrivals of earlier programs; a waiting thread looks `patience` times before it gives way.
    Where `cycles` is not 0, the first thread adds what each instruction took, waiting included, to int64s there.
    """
    instructions = int64s(program, (count, PROGRAM_COLUMNS))
    is_timing = cycles != 0 and rank == 0
    started = read_cycles() if is_timing else 0
    for index in range(count):
        call_kernel(instructions[index, 0], instructions[index, 1], step, rank, size)
        fetch_add(arrivals, 1)
        spins = 0
        while load_shared(arrivals) < before + size * (index + 1):
            spins += 1
            if spins == patience:
                give_way()
                spins = 0
        if is_timing:
            now = read_cycles()
            int64s(cycles, count)[index] += now - started
            started = now


class Team:
    """`size` threads, the caller's among them.

    `spins`: whether those that wait keep their core.  `cpus` pins each to one CPU, where the system allows that.
    """

    def __init__(self, size: int, *, spins: bool = True, cpus: Sequence[int] = ()) -> None:
        self.size = size
        self._patience = LONG_PATIENCE if spins else SHORT_PATIENCE
        self._arrivals = np.zeros(8, dtype=np.int64)
        self._num_arrived = 0
        self._run = numba.njit(nogil=True, cache=bool(numba.config.CACHE_DIR))(_run)
        self._job: tuple[int, ...] | None = None
        self._wake = [threading.Semaphore(0) for _ in range(1, size)]
        if cpus:
            _pin(cpus[0])
        for rank in range(1, size):
            cpu = cpus[rank % len(cpus)] if cpus else None
            threading.Thread(target=self._help, args=(rank, cpu), name=f"team-{rank}", daemon=True).start()

    def run(self, program: np.ndarray, step: np.ndarray, cycles: np.ndarray | None = None) -> None:
        """Run a program, int64 [instructions, 2], on a step's numbers; returns when it is done.

        Adds the cycles that each instruction took to `cycles` int64 [instructions].  One program at a time, always
        from the same thread.
        """
        count = len(program)
        arrivals = self._arrivals.ctypes.data
        times = 0 if cycles is None else cycles.ctypes.data
        job = (program.ctypes.data, count, step.ctypes.data, arrivals, self._num_arrived, self._patience, times)
        self._job = job
        for wake in self._wake:
            wake.release()
        self._run(*job, 0, self.size)
        self._num_arrived += count * self.size

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
            if self._job is None:
                return
            self._run(*self._job, rank, self.size)


def _pin(cpu: int) -> None:
    """Keep the calling thread on one CPU."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, (cpu,))

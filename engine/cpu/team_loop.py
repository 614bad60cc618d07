"""What a team's threads run: one instruction of a program after the other, together.

`engine.cpu.team` says how; its threads call `lead` and `join`, compiled as kernels are.
"""

from __future__ import annotations

import numba

from engine.cpu.kernel import Body
from engine.cpu.memory import call_kernel, compare_exchange, fetch_add, give_way, int64s, load_shared, read_cycles
from engine.cpu.team import CURRENT, INSIDE, MEMBERS, OPEN, PROGRAM_COLUMNS, SHARED_NUMBERS


@numba.njit(error_model="numpy")
def _run(program, count, step, shared, patience, cycles, rank, size):
    """Run the instructions that are left, as thread `rank` of `size`.

    A waiting thread looks `patience` times before it gives way.  Where `cycles` is not 0, the first thread adds what
    each instruction took, waiting included, to int64s there.
    """
    instructions = int64s(program, (count, PROGRAM_COLUMNS))
    current = shared + 8 * CURRENT
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


def join() -> Body:
    """Help with program number `turn`, unless it is over."""

    def kernel(program, count, step, shared, patience, turn, rank, size):
        members = shared + 8 * MEMBERS
        fetch_add(members, 1)
        if load_shared(shared + 8 * OPEN) == turn:
            _run(program, count, step, shared, patience, 0, rank, size)
        fetch_add(members, -1)

    return kernel


def lead() -> Body:
    """Run program number `turn` as the first thread; returns when nobody is in it any more."""

    def kernel(program, count, step, shared, patience, turn, cycles, size):
        numbers = int64s(shared, SHARED_NUMBERS)
        numbers[CURRENT] = 0
        fetch_add(shared + 8 * OPEN, turn)
        _run(program, count, step, shared, patience, cycles, 0, size)
        fetch_add(shared + 8 * OPEN, -turn)
        looks = 0
        while load_shared(shared + 8 * MEMBERS) > 0:
            looks += 1
            if looks == patience:
                give_way()
                looks = 0

    return kernel

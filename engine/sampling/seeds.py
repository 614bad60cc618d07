"""One uniform number per row and step, a pure function of the request's seed and the token's position.

Counter-based, so a seeded request repeats itself exactly whatever shares its batch and
however often it is preempted.  The mixing function is splitmix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at `position` of a request seeded with `seed`."""
    return (_mix(_mix(seed & _MASK) + (position + 1) * _GOLDEN_GAMMA) >> 11) / (1 << 53)


def derive(engine_seed: int, sequence_id: int) -> int:
    """The seed of a request that brought none."""
    return _mix(_mix(engine_seed & _MASK) ^ sequence_id)


def _mix(state: int) -> int:
    state = (state + _GOLDEN_GAMMA) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)

"""The token-id workloads that engines are compared on, and how a repeat of one avoids the prefix cache.

Deterministic: the same names give the same ids on every machine, so that figures of different
engines count the same tokens.  Ids lie in 10..10000; end-of-sequence is to be ignored.  Knows no
engine.  Used by the scripts beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

LOWEST_ID, HIGHEST_ID = 10, 10_000
NUM_LONG_PROMPTS = 8
LONG_PROMPT_TOKENS = 8192
_SHIFT = 7919
"""Prime, so that the ids of hundreds of repeats differ from one another."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and the exact number of tokens to generate for it."""

    token_ids: tuple[int, ...]
    max_tokens: int


def workload(name: str) -> list[Request]:
    """The requests of a workload: one of `NAMES`, or any burstN_IN_OUT.  Raises `KeyError` for another name."""
    if burst := _BURST.fullmatch(name):
        return _burst(*map(int, burst.groups()))
    return _MAKERS[name]()


def is_workload(name: str) -> bool:
    return name in NAMES or _BURST.fullmatch(name) is not None


def repeated(requests: list[Request], repeat: int, vocab_size: int) -> list[Request]:
    """The same shapes with other ids, so that no repeat finds another's prompts in the cache; repeat 0 changes nothing.

    A vocabulary smaller than the ids folds them into it.
    """
    span = HIGHEST_ID - LOWEST_ID + 1

    def shift(token_id: int) -> int:
        return (LOWEST_ID + (token_id - LOWEST_ID + repeat * _SHIFT) % span) % vocab_size

    return [Request(tuple(map(shift, request.token_ids)), request.max_tokens) for request in requests]


def shrunk(requests: list[Request], divisor: int) -> list[Request]:
    """A small likeness for trying a script: fewer requests, shorter prompts and answers."""
    kept = requests[:: max(1, min(divisor, len(requests)))] if divisor > 1 else requests
    return [
        Request(request.token_ids[: max(1, len(request.token_ids) // divisor)], max(1, request.max_tokens // divisor))
        for request in kept
    ]


def _random_ids(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randint(LOWEST_ID, HIGHEST_ID) for _ in range(count))


def _single() -> list[Request]:
    return [Request(_random_ids(Random(1), 512), 256)]


def _burst(num_requests: int, prompt_tokens: int, max_tokens: int) -> list[Request]:
    rng = Random(2)
    return [Request(_random_ids(rng, prompt_tokens), max_tokens) for _ in range(num_requests)]


def _mix() -> list[Request]:
    rng = Random(0)
    return [Request(_random_ids(rng, rng.randint(100, 1024)), rng.randint(100, 1024)) for _ in range(256)]


def _prefill() -> list[Request]:
    rng = Random(3)
    return [Request(_random_ids(rng, LONG_PROMPT_TOKENS), 1) for _ in range(NUM_LONG_PROMPTS)]


_BURST = re.compile(r"burst(\d+)_(\d+)_(\d+)")
_MAKERS = {
    "single_512_256": _single,
    "burst64_512_256": lambda: _burst(64, 512, 256),
    "mix256_100-1024": _mix,
    "prefill_8k": _prefill,
}
NAMES = tuple(_MAKERS)

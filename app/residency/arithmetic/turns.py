"""Whose turn it is when more models are asked for than fit and none of those that are there is idle.

Pure arithmetic.  A model's turn begins when it is loaded or woken.  It lasts at least until the requests that
were queued for it by then are answered, and longer while it is busy and nobody waits for long; then it is
drained: its open requests go on to their end, new ones queue as for a model that is not there.  So every model
gets its turn, and no load is paid for nothing.  Called by `app.residency.arranger` when `placement` says that
a model could wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE_S = 2.0
"""A request waits this long for a model to become idle by itself before one is drained for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A model that is not there, with requests; `short_bytes` is that of its `NoRoom`, on `device`."""

    name: str
    device: str
    oldest_wait_s: float
    num_queued: int
    short_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A model that is there.

    `turn_s`: for how long.  `num_owed`: of the requests that were queued for it when its turn began, how many are
    not answered yet.  `frees_bytes`: what its leaving frees of `device` beyond what it could give anyway.
    """

    name: str
    device: str
    turn_s: float
    num_owed: int
    frees_bytes: int
    is_busy: bool = True
    is_pinned: bool = False
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class NextTurn:
    """Load `load` as soon as the models of `drain` are idle; none to drain means that it has only to wait."""

    load: str
    drain: tuple[str, ...] = ()


def next_turn(waiting: Sequence[Waiting], turns: Sequence[Turn], *, patience_s: float = PATIENCE_S) -> NextTurn | None:
    """The model to be loaded next, and which models are to be drained for it; None if nobody waits.

    The longest wait decides.  Drained are those whose turn has lasted longest, none that is pinned or still owes
    answers, and no more than it takes; those that are being drained already count first.  Idle models are not
    drained: `placement` finds them by itself.
    """
    if not waiting:
        return None
    first = max(waiting, key=lambda one: (one.oldest_wait_s, one.num_queued, one.name))
    missing = first.short_bytes
    for turn in turns:
        if turn.device == first.device and turn.is_draining:
            missing -= turn.frees_bytes
    if missing <= 0 or first.oldest_wait_s < patience_s:
        return NextTurn(first.name)
    over = [
        turn
        for turn in turns
        if turn.device == first.device and turn.is_busy and turn.num_owed == 0
        if not turn.is_pinned and not turn.is_draining and turn.frees_bytes > 0
    ]
    drained: list[Turn] = []
    for turn in sorted(over, key=lambda one: (-one.turn_s, one.name)):
        if missing > 0:
            drained.append(turn)
            missing -= turn.frees_bytes
    if missing > 0:
        return NextTurn(first.name)
    for turn in reversed(drained[:]):
        if turn.frees_bytes <= -missing:
            missing += turn.frees_bytes
            drained.remove(turn)
    return NextTurn(first.name, tuple(turn.name for turn in drained))

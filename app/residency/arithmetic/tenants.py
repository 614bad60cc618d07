"""The values that the arithmetic of residency works on: a device, what a model needs, a model that is there.

Plain and frozen: no I/O, no clock, no state.  All sizes are in bytes, times in seconds of one clock.  Made by
`app.residency.describe` and `room` from what workers and devices report; read by `placement`, `resplit` and `ledger`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

TenantState = Literal["loading", "awake", "asleep"]


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A device as the daemon may use it.

    `others_bytes` is what programs hold that are not ours; `limit` is the part of the total that all models
    together may have, from which that comes off.
    """

    name: str
    total_bytes: int
    others_bytes: int
    limit: float

    @property
    def limit_bytes(self) -> int:
        return int(self.total_bytes * self.limit)

    @property
    def usable_bytes(self) -> int:
        return max(0, self.limit_bytes - self.others_bytes)

    def share_bytes(self, share: float) -> int:
        """What a share of this device is."""
        return int(self.total_bytes * share)

    def share_of(self, size_bytes: int) -> float:
        """The least share, in hundredths, that is enough for so many bytes; may be above 1."""
        if self.total_bytes <= 0:
            return math.inf
        hundredths = math.ceil(100 * size_bytes / self.total_bytes)
        while self.share_bytes(hundredths / 100) < size_bytes:
            hundredths += 1
        return hundredths / 100

    def share_within(self, size_bytes: int) -> float:
        """The largest share, in hundredths, that is no more than so many bytes."""
        enough = self.share_of(size_bytes)
        return enough if self.share_bytes(enough) <= size_bytes else max(0, round(100 * enough) - 1) / 100


@dataclass(frozen=True, slots=True)
class Need:
    """What a model takes of a device.

    `fixed_bytes` is everything besides the KV cache.  Of that, `least_kv_bytes` lets it serve one usual
    conversation, `wanted_kv_bytes` is for its traffic, and more than `most_kv_bytes` it could never fill.
    `certain_bytes` is given where `fixed_bytes` is an estimate: with less than that the model cannot run for
    certain, with more its worker may try.
    """

    fixed_bytes: int
    least_kv_bytes: int
    wanted_kv_bytes: int
    most_kv_bytes: int
    certain_bytes: int | None = None

    @property
    def least_bytes(self) -> int:
        return self.fixed_bytes + self.least_kv_bytes

    @property
    def refused_below_bytes(self) -> int:
        """With less there is no use in trying."""
        return self.least_bytes if self.certain_bytes is None else min(self.certain_bytes, self.least_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A model that is on a device.

    `fixed_bytes` is what it holds besides its KV cache while it is awake, `kv_bytes` the memory of its cache now
    (while it loads: what it was promised), `kv_used_bytes` the part that open sequences hold.  Least, wanted and
    most are as in `Need`.  `asleep_bytes` is what it holds of the device while it sleeps, as far as that is
    known, and `weight_bytes` what then lies in host memory.  `is_busy`: it has requests, running, waiting or
    queued; `num_waiting` of those wait for room in the cache.
    """

    name: str
    device: str
    state: TenantState
    fixed_bytes: int
    kv_bytes: int
    last_used_at: float
    kv_used_bytes: int = 0
    least_kv_bytes: int = 0
    wanted_kv_bytes: int = 0
    most_kv_bytes: int = 0
    asleep_bytes: int = 0
    weight_bytes: int = 0
    share: float | None = None
    is_pinned: bool = False
    is_busy: bool = False
    num_waiting: int = 0
    num_uses: int = 0
    load_seconds: float = 0.0
    can_sleep: bool = False

    @property
    def held_bytes(self) -> int:
        """What it holds of its device now."""
        return self.held_asleep_bytes if self.state == "asleep" else self.fixed_bytes + self.kv_bytes

    @property
    def held_asleep_bytes(self) -> int:
        """What it holds of its device while it sleeps; before it ever has, all besides weights and KV cache."""
        return self.asleep_bytes or max(0, self.fixed_bytes - self.weight_bytes)

    def idle_s(self, now: float) -> float:
        """For how long nobody has used it."""
        return max(0.0, now - self.last_used_at)

    @property
    def needed_kv_bytes(self) -> int:
        """The KV cache that it must keep: what is in use, with room for one more conversation while it is busy."""
        in_use = self.kv_used_bytes + (self.least_kv_bytes if self.is_busy else 0)
        return min(self.kv_bytes, max(in_use, self.least_kv_bytes))

    def entitled_bytes(self, device: DeviceShare) -> int:
        """What was promised to it while it is awake: its share; 0 without one."""
        return 0 if self.share is None or self.state == "asleep" else device.share_bytes(self.share)

    def reserved_bytes(self, device: DeviceShare) -> int:
        """What nobody else may count on: what it holds, or its share, of which it may have lent a part."""
        return max(self.held_bytes, self.entitled_bytes(device))


@dataclass(frozen=True, slots=True)
class Shrink:
    """Give this model's KV cache so many bytes, fewer than it has."""

    name: str
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """Move this model's weights to host memory."""

    name: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Stop this model's worker, awake or asleep."""

    name: str


Action = Shrink | Sleep | Unload


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model goes: first the `actions` in order, then it may hold `budget_bytes` of `device`.

    `kv_bytes` of that are for its KV cache.  `reasons` are sentences, one for each action and for what it gets
    less than it asked for.
    """

    device: str
    budget_bytes: int
    kv_bytes: int
    actions: tuple[Action, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[tuple[Action, str], ...]:
        """Each action with its reason."""
        return tuple(zip(self.actions, self.reasons[: len(self.actions)], strict=True))

    @property
    def remarks(self) -> tuple[str, ...]:
        """The reasons that are about the model itself."""
        return self.reasons[len(self.actions) :]


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A model cannot have room.

    `sentence` says why and what to do.  `least_share` is the share that is enough for the model where it is
    possible at all.  `could_wait`: it will fit once models that are busy now are idle; `short_bytes` is what
    those have to give.
    """

    sentence: str
    least_share: float | None
    could_wait: bool
    device: str = ""
    short_bytes: int = 0

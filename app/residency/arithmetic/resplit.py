"""The live re-split: KV cache moves from models that do not use it to those that are short of it.

Pure arithmetic, called by `app.residency.balancer` once a second while models are short of it.  It takes small steps
and keeps a distance between "short" and "has to spare", so that two busy models never pass the same bytes to and
fro.  A share is an entitlement: its idle owner lends from it, and takes it back when it is short itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from app.residency.arithmetic.tenants import DeviceShare, Tenant

_FULL = 0.9
"""A cache of which so much is in use is short of room."""
_HALF = 0.5
"""Or so much, where requests wait: a long prompt needs many blocks at once."""
_ROOMY = 0.7
"""A busy model gives only what leaves it less full than this."""
_GROWTH = 0.5
"""Of its present cache a model gets at most so much more at a time, or room for one conversation."""
_LEAST_STEP = 1 / 32
"""Of its present cache; less is not worth a resize."""


def resplit(tenants: Iterable[Tenant], device: DeviceShare) -> tuple[tuple[str, int], ...]:
    """The (name, KV bytes) that should change on one device, all that shrink before those that grow.

    Nobody gets less than it uses, nor less than its least unless it has less already; together they stay within
    what is usable, or come as near to that as unused KV cache allows where other programs have taken more.
    """
    split = _Split(device, tuple(tenants))
    if split.free < 0:
        split.give_back()
    else:
        split.serve_the_short()
    return split.changes()


def restore(name: str, tenants: Iterable[Tenant], device: DeviceShare) -> tuple[tuple[str, int], ...]:
    """As `resplit`, for a model that is used again after others took what it did not use.

    It gets what its traffic wants, its whole context included, as far as that is free or others do not use it.
    """
    split = _Split(device, tuple(tenants))
    split.restore(name)
    return split.changes()


def is_restored(tenant: Tenant, device: DeviceShare) -> bool:
    """Whether a model has what it gets while nobody else needs it."""
    return tenant.state != "awake" or tenant.kv_bytes >= comfortable_kv_bytes(tenant, device)


def comfortable_kv_bytes(tenant: Tenant, device: DeviceShare) -> int:
    """The KV cache that a model gets of free memory: that of its share, or what its traffic wants."""
    wanted = entitled_kv_bytes(tenant, device) if tenant.share is not None else tenant.wanted_kv_bytes
    return min(wanted, tenant.most_kv_bytes)


def entitled_kv_bytes(tenant: Tenant, device: DeviceShare) -> int:
    """The KV cache that belongs to a model's share, as far as it could ever fill it."""
    return min(tenant.most_kv_bytes, max(0, tenant.entitled_bytes(device) - tenant.fixed_bytes))


def is_short(tenant: Tenant) -> bool:
    """Whether more KV cache would serve a model's requests sooner."""
    return tenant.state == "awake" and _is_full(tenant) and tenant.kv_bytes < tenant.most_kv_bytes


def _is_full(tenant: Tenant) -> bool:
    """Whether requests wait for KV cache, or soon will.

    Requests that wait beside an empty cache wait for something else: a place among the sequences of a step.
    """
    if not tenant.is_busy:
        return False
    used, has = tenant.kv_used_bytes, tenant.kv_bytes
    return used >= _FULL * has or (
        tenant.num_waiting > 0 and (used >= _HALF * has or has - used < tenant.least_kv_bytes)
    )


@dataclass(frozen=True, slots=True)
class _Donor:
    """A model that can come down to `floor` bytes of KV cache."""

    tenant: Tenant
    floor: int


class _Split:
    """The KV cache of the models that are awake on one device, as it is being divided anew."""

    def __init__(self, device: DeviceShare, tenants: tuple[Tenant, ...]) -> None:
        self._device = device
        self._awake = sorted((tenant for tenant in tenants if tenant.state == "awake"), key=lambda one: one.name)
        self._kv = {tenant.name: tenant.kv_bytes for tenant in self._awake}
        self.free = device.limit_bytes - device.others_bytes - sum(tenant.held_bytes for tenant in tenants)

    def changes(self) -> tuple[tuple[str, int], ...]:
        changed = [(one.name, self._kv[one.name], one.kv_bytes) for one in self._awake]
        shrinks = [(name, now) for name, now, before in changed if now < before]
        grows = [(name, now) for name, now, before in changed if now > before]
        return (*shrinks, *grows)

    def give_back(self) -> None:
        """Other programs hold what was promised: give them what nobody uses, idle models first."""
        for is_busy in (False, True):
            donors = [_Donor(one, one.needed_kv_bytes) for one in self._awake if one.is_busy == is_busy]
            self._take(donors, -self.free)

    def serve_the_short(self) -> None:
        short = [tenant for tenant in self._awake if is_short(tenant)]
        for tenant in sorted(short, key=self._urgency):
            if self._kv[tenant.name] == tenant.kv_bytes:  # not one that has just given back what it borrowed
                self._serve(tenant)
        if not short:
            for tenant in sorted(self._awake, key=lambda one: (not one.is_busy, -one.last_used_at)):
                self._grow(tenant, comfortable_kv_bytes(tenant, self._device) - tenant.kv_bytes)

    def restore(self, name: str) -> None:
        for tenant in self._awake:
            missing = comfortable_kv_bytes(tenant, self._device) - tenant.kv_bytes
            if tenant.name == name and self.free >= 0 < missing:
                before = self._kv.copy(), self.free
                self._take(self._unused(tenant), missing - self.free)
                if not self._grow(tenant, missing):
                    self._kv, self.free = before

    def _serve(self, tenant: Tenant) -> None:
        """Let a model grow one step: by what is free, by what others do not use, by what they have of its share."""
        has, entitled = tenant.kv_bytes, entitled_kv_bytes(tenant, self._device)
        step = max(int(has * _GROWTH), tenant.least_kv_bytes, entitled - has)
        wanted = min(tenant.most_kv_bytes - has, step)
        before = self._kv.copy(), self.free
        self._take(self._unused(tenant), wanted - self.free)
        self._take(self._beyond_entitlement(tenant), min(wanted, entitled - has) - self.free)
        if not self._grow(tenant, wanted):
            self._kv, self.free = before

    def _unused(self, taker: Tenant) -> list[_Donor]:
        """What idle models have beyond their least, then what busy ones have in plenty and beyond their share."""
        others = [one for one in self._awake if one.name != taker.name and not _is_full(one)]
        idle = [_Donor(one, one.needed_kv_bytes) for one in others if not one.is_busy]
        busy = [
            _Donor(one, max(one.needed_kv_bytes, int(one.kv_used_bytes / _ROOMY), entitled_kv_bytes(one, self._device)))
            for one in others
            if one.is_busy and one.num_waiting == 0
        ]
        return [*sorted(idle, key=lambda donor: donor.tenant.last_used_at), *sorted(busy, key=self._spare)]

    def _beyond_entitlement(self, taker: Tenant) -> list[_Donor]:
        """What busy models, short of room themselves, hold beyond their share and do not use at this moment."""
        donors = [
            _Donor(
                one, max(one.kv_used_bytes, min(one.kv_bytes, one.least_kv_bytes), entitled_kv_bytes(one, self._device))
            )
            for one in self._awake
            if one.name != taker.name and one.is_busy
        ]
        return sorted(donors, key=self._spare)

    def _take(self, donors: Iterable[_Donor], missing: int) -> None:
        """Make `missing` bytes more free, from the first donors first."""
        for donor in donors:
            has = self._kv[donor.tenant.name]
            given = min(missing, has - donor.floor)
            if given > 0:
                self._kv[donor.tenant.name] = has - given
                self.free += given
                missing -= given

    def _grow(self, tenant: Tenant, wanted: int) -> bool:
        """Add what is wanted, as far as it is free; whether that was enough to be worth a resize."""
        more = min(wanted, self.free)
        is_worth_it = more > 0 and more >= int(tenant.kv_bytes * _LEAST_STEP)
        if is_worth_it:
            self._kv[tenant.name] += more
            self.free -= more
        return is_worth_it

    def _urgency(self, tenant: Tenant) -> tuple[bool, int, str]:
        """Those whose share is lent first, then those with most requests that wait."""
        return tenant.kv_bytes >= entitled_kv_bytes(tenant, self._device), -tenant.num_waiting, tenant.name

    def _spare(self, donor: _Donor) -> tuple[int, str]:
        return donor.floor - donor.tenant.kv_bytes, donor.tenant.name

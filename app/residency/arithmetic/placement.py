"""Where a model goes, and who makes room for it: pure arithmetic over plain values, explained in sentences.

A model is placed beside the others where that is possible: in what is free, then in KV cache that others have
beyond the needs of their traffic, then in KV cache that nobody uses.  Only then idle models leave
(`app.residency.arithmetic.victims`): to sleep where host memory has room for their weights and that frees enough, else
unloaded.  A share is a promise for as long as its model is awake: no other model is placed in it.  Called by
`app.residency.arranger` and `changes`, which have the actions carried out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from app.residency.arithmetic.tenants import DeviceShare, Need, NoRoom, Placement, Shrink, Sleep, Tenant, Unload
from app.residency.arithmetic.victims import choose_sleepers, choose_victims, keep_value, may_leave
from app.residency.words import list_text, memory_name, span_text
from store.space import format_bytes


def place(
    name: str,
    need: Need,
    *,
    share: float | None,
    device_wish: str | None,
    devices: Sequence[DeviceShare],
    tenants: Iterable[Tenant],
    host_free_bytes: int,
    now: float,
) -> Placement | NoRoom:
    """Room for a model that is on no device yet.

    `device_wish` is "auto", "cuda" or the name of a device.  Of several devices that one is taken where no model
    has to leave, or those whose loss costs least, and then the one with most room.
    """
    wished = [device for device in devices if _is_wished(device.name, device_wish)]
    if not wished:
        return NoRoom(
            f"{name} is to run on {device_wish}, which this machine does not have; it has "
            f"{list_text([device.name for device in devices])}.",
            least_share=None,
            could_wait=False,
        )
    others = [tenant for tenant in tenants if tenant.name != name]
    searches = [_Search(name, need, share, device, _on(device, others), host_free_bytes, now) for device in wished]
    placements: list[tuple[_Search, Placement]] = []
    refusals: list[NoRoom] = []
    for search in searches:
        outcome = search.run()
        if isinstance(outcome, NoRoom):
            refusals.append(outcome)
        else:
            placements.append((search, outcome))
    if placements:
        return min(placements, key=lambda found: found[0].cost(found[1]))[1]
    return min(refusals, key=lambda refusal: (not refusal.could_wait, refusal.short_bytes))


def wake_placement(
    tenant: Tenant, *, device: DeviceShare, tenants: Iterable[Tenant], host_free_bytes: int, now: float
) -> Placement | NoRoom:
    """Room for a model that sleeps on `device`, which it cannot leave."""
    others = [other for other in tenants if other.name != tenant.name]
    need = _need_of(tenant)
    return _Search(tenant.name, need, tenant.share, device, _on(device, others), host_free_bytes, now).run()


def reshare(
    tenant: Tenant, share: float, *, device: DeviceShare, tenants: Iterable[Tenant], now: float
) -> Placement | NoRoom:
    """A new share for a model that is awake; others give KV cache that they do not use, but none has to leave.

    The budget is more than the share where open sequences hold more by now.
    """
    others = [other for other in tenants if other.name != tenant.name]
    need = _need_of(tenant)
    found = _Search(tenant.name, need, share, device, _on(device, others), 0, now, may_evict=False).run()
    in_use = tenant.fixed_bytes + tenant.kv_used_bytes
    if isinstance(found, NoRoom) or found.budget_bytes >= in_use:
        return found
    return replace(found, budget_bytes=in_use, kv_bytes=tenant.kv_used_bytes)


def _need_of(tenant: Tenant) -> Need:
    return Need(tenant.fixed_bytes, tenant.least_kv_bytes, tenant.wanted_kv_bytes, tenant.most_kv_bytes)


def _on(device: DeviceShare, tenants: Iterable[Tenant]) -> tuple[Tenant, ...]:
    return tuple(tenant for tenant in tenants if tenant.device == device.name)


def _is_wished(device: str, wish: str | None) -> bool:
    return wish in (None, "auto", device, device.partition(":")[0])


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for room for one model on one device, on which `tenants` are."""

    name: str
    need: Need
    share: float | None
    device: DeviceShare
    tenants: tuple[Tenant, ...]
    host_free_bytes: int
    now: float
    may_evict: bool = True

    def run(self) -> Placement | NoRoom:
        if refusal := self._never_fits():
            return refusal
        least, wanted = self._goals()
        found = self._find(least, wanted)
        if found is None and self.share is not None and self.device.others_bytes:
            # What other programs hold shortens a share; the sum of the shares is no reason to.
            least_of_all = min(least, max(self.need.least_bytes, wanted - self.device.others_bytes))
            found = self._find(least_of_all, wanted)
        return found or self._no_room(least)

    def cost(self, placement: Placement) -> tuple[float, int, int, int]:
        """What a placement costs the others, then how little the model itself gets, then how full the device is."""
        leaving = {action.name for action in placement.actions if not isinstance(action, Shrink)}
        value = sum(keep_value(tenant, self.now) for tenant in self.tenants if tenant.name in leaving)
        return value, len(placement.actions), -placement.kv_bytes, -self._free(self.tenants)

    def _goals(self) -> tuple[int, int]:
        """What the model must have, and what it is to have: a share is both, as is a device that is barely enough."""
        need, limit = self.need, self.device.limit_bytes
        if self.share is not None:
            budget = self.device.share_bytes(self.share)
            return budget, budget
        return min(need.least_bytes, limit), need.fixed_bytes + max(need.least_kv_bytes, need.wanted_kv_bytes)

    def _find(self, least: int, wanted: int) -> Placement | None:
        found = self._beside(self.tenants, least, wanted)
        if found is not None or not self.may_evict:
            return found
        free = self._free(self.tenants)
        squeezed = {tenant.name: tenant.kv_bytes - self._kept_kv(tenant, 0) for tenant in self.tenants}
        missing = least - free - sum(squeezed.values())

        def freed(tenant: Tenant) -> int:
            return tenant.reserved_bytes(self.device) - squeezed[tenant.name]

        victims = choose_victims(filter(may_leave, self.tenants), missing, freed, self.now)
        if victims is None:
            return None
        slack = sum(map(freed, victims)) - missing
        sleepers = choose_sleepers(victims, slack, self.host_free_bytes, self.now)
        gone = {tenant.name for tenant in victims}
        staying = [tenant for tenant in self.tenants if tenant.name not in gone]
        asleep = [replace(tenant, state="asleep") for tenant in victims if tenant.name in sleepers]
        found = self._beside((*staying, *asleep), least, wanted)
        assert found is not None, "the victims were chosen to free enough"
        actions = tuple(Sleep(victim.name) if victim.name in sleepers else Unload(victim.name) for victim in victims)
        reasons = tuple(self._why_leaving(victim, victim.name in sleepers, least, free) for victim in victims)
        return replace(found, actions=(*actions, *found.actions), reasons=(*reasons, *found.reasons))

    def _beside(self, tenants: Sequence[Tenant], least: int, wanted: int) -> Placement | None:
        """Room beside all of `tenants`, in what is free and in their spare KV cache."""
        free = self._free(tenants)
        if free >= wanted:
            return self._placed(wanted, (), wanted, free)
        spare = _shrinks([(tenant, self._kept_kv(tenant, tenant.wanted_kv_bytes)) for tenant in tenants], wanted - free)
        got = free + _gain(tenants, spare)
        if got >= least:
            return self._placed(min(got, wanted), spare, wanted, free)
        squeezed = _shrinks([(tenant, self._kept_kv(tenant, 0)) for tenant in tenants], least - free)
        got = free + _gain(tenants, squeezed)
        return self._placed(least, squeezed, wanted, free) if got >= least else None

    def _free(self, tenants: Iterable[Tenant]) -> int:
        """What nobody holds and to nobody is promised; negative where shares are lent or others took more."""
        reserved = sum(tenant.reserved_bytes(self.device) for tenant in tenants)
        return self.device.limit_bytes - self.device.others_bytes - reserved

    def _kept_kv(self, tenant: Tenant, kv_bytes: int) -> int:
        """The KV cache that a tenant keeps when it is to come down to `kv_bytes`: also what it needs, and its share."""
        if tenant.state != "awake":
            return tenant.kv_bytes
        entitled = tenant.entitled_bytes(self.device) - tenant.fixed_bytes
        return min(tenant.kv_bytes, max(kv_bytes, tenant.needed_kv_bytes, entitled))

    def _placed(self, budget: int, shrinks: Sequence[Shrink], wanted: int, free: int) -> Placement:
        kv_bytes = min(max(0, budget - self.need.fixed_bytes), max(self.need.most_kv_bytes, self.need.least_kv_bytes))
        by_name = {tenant.name: tenant for tenant in self.tenants}
        reasons = [self._why_shrunk(by_name[shrink.name], shrink, budget, free) for shrink in shrinks]
        if budget < wanted:
            why = "other programs hold the rest" if self.share is not None else "others use the rest"
            reasons.append(
                f"{self.name} gets {format_bytes(budget)} of {memory_name(self.device.name)} instead of "
                f"{format_bytes(wanted)}, because {why}."
            )
        return Placement(self.device.name, budget, kv_bytes, tuple(shrinks), tuple(reasons))

    def _why_leaving(self, victim: Tenant, sleeps: bool, least: int, free: int) -> str:
        what = "put to sleep" if sleeps else "unloaded"
        idle = span_text(victim.idle_s(self.now))
        return f"{victim.name} was {what} (idle for {idle}) because {self._shortage(least, free)}."

    def _why_shrunk(self, tenant: Tenant, shrink: Shrink, budget: int, free: int) -> str:
        given = format_bytes(tenant.kv_bytes - shrink.kv_bytes)
        return f"{tenant.name} gave {given} of KV cache it does not use because {self._shortage(budget, free)}."

    def _shortage(self, needed: int, free: int) -> str:
        return (
            f"{self.name} needs {format_bytes(needed)} of {memory_name(self.device.name)} and "
            f"{format_bytes(max(0, free))} were free"
        )

    def _never_fits(self) -> NoRoom | None:
        """The refusal of a model that could not run if it had the device, or its share, for itself."""
        device, needed = self.device, self.need.refused_below_bytes
        if needed > device.limit_bytes:
            what_to_do = "raise memory_limit, or " if needed <= device.total_bytes else ""
            return NoRoom(
                f"{self.name} needs at least {format_bytes(needed)} and models may have "
                f"{format_bytes(device.limit_bytes)} of {memory_name(device.name)} in all; "
                f"{what_to_do}choose a smaller model.",
                least_share=None,
                could_wait=False,
                device=device.name,
                short_bytes=needed - device.limit_bytes,
            )
        if self.share is not None and device.share_bytes(self.share) < needed:
            return NoRoom(
                f"{self.name} needs at least {format_bytes(needed)} of {memory_name(device.name)} and its share of "
                f"{self.share:g} is {format_bytes(device.share_bytes(self.share))}; a share of {self._least_share():g} "
                "is enough.",
                least_share=self._least_share(),
                could_wait=False,
                device=device.name,
                short_bytes=needed - device.share_bytes(self.share),
            )
        return None

    def _least_share(self) -> float:
        """The share that is enough, or the largest there can be, where that may be."""
        return min(self.device.share_of(self.need.least_bytes), self.device.limit)

    def _no_room(self, least: int) -> NoRoom:
        """The refusal where others are in the way: who they are, and what would help."""
        device = self.device
        free = self._free(self.tenants)
        leaving = [tenant for tenant in self.tenants if self.may_evict and may_leave(tenant)]
        names = {tenant.name for tenant in leaving}
        staying = [tenant for tenant in self.tenants if tenant.name not in names]
        freed = sum(tenant.reserved_bytes(device) for tenant in leaving)
        freed_when_idle = freed + sum(self._freed_when_idle(tenant) for tenant in staying)
        freed += sum(tenant.kv_bytes - self._kept_kv(tenant, 0) for tenant in staying)
        could_wait = self.may_evict and free + freed_when_idle >= least
        available = max(0, free + freed)
        return NoRoom(
            f"{self.name} needs {format_bytes(least)} of {memory_name(device.name)}{self._because_of_share()} and "
            f"{format_bytes(available)} can be made free{self._who_stays(staying)}; "
            f"{self._what_to_do(staying, least, available, could_wait)}.",
            least_share=self._least_share(),
            could_wait=could_wait,
            device=device.name,
            short_bytes=least - free - freed,
        )

    def _freed_when_idle(self, tenant: Tenant) -> int:
        """What a model that is busy or loading now could give once it is idle."""
        if not tenant.is_pinned:
            return tenant.reserved_bytes(self.device)
        idle = replace(tenant, is_busy=False, kv_used_bytes=0)
        return tenant.kv_bytes - self._kept_kv(idle, 0)

    def _because_of_share(self) -> str:
        return f" (its share of {self.share:g})" if self.share is not None else ""

    def _who_stays(self, staying: Sequence[Tenant]) -> str:
        """`, since a keeps 12.0 GiB (pinned) and other programs use 2.0 GiB`."""
        kept = {one.name: one.reserved_bytes(self.device) - one.kv_bytes + self._kept_kv(one, 0) for one in staying}
        keeps = [
            f"{one.name} keeps {format_bytes(kept[one.name])} ({_why_it_stays(one)})"
            for one in sorted(staying, key=lambda one: -kept[one.name])
        ]
        if self.device.others_bytes:
            keeps.append(f"other programs use {format_bytes(self.device.others_bytes)}")
        return f", since {list_text(keeps)}" if keeps else ""

    def _what_to_do(self, staying: Sequence[Tenant], least: int, available: int, could_wait: bool) -> str:
        if could_wait:
            return "wait until one of them is idle"
        if self.share is not None and available >= self.need.least_bytes:
            return f"there is room for a share of {self.device.share_within(available):g}"
        if staying and self.device.usable_bytes >= least:
            return (
                "stop or unpin one of them, or choose a smaller model" if self.may_evict else "stop one of them first"
            )
        return "stop other programs that use the device, raise memory_limit, or choose a smaller model"


def _why_it_stays(tenant: Tenant) -> str:
    if tenant.state == "loading":
        return "loading"
    return "pinned" if tenant.is_pinned else "busy" if tenant.is_busy else tenant.state


def _shrinks(kept: Sequence[tuple[Tenant, int]], missing_bytes: int) -> list[Shrink]:
    """Take what is missing from those who can spare most, as far as that goes; `kept` is what each keeps of its KV."""
    shrinks = []
    for tenant, kv_bytes in sorted(kept, key=lambda pair: (pair[1] - pair[0].kv_bytes, pair[0].name)):
        spare = min(tenant.kv_bytes - kv_bytes, missing_bytes)
        if spare > 0:
            shrinks.append(Shrink(tenant.name, tenant.kv_bytes - spare))
            missing_bytes -= spare
    return shrinks


def _gain(tenants: Iterable[Tenant], shrinks: Iterable[Shrink]) -> int:
    kv_bytes = {tenant.name: tenant.kv_bytes for tenant in tenants}
    return sum(kv_bytes[shrink.name] - shrink.kv_bytes for shrink in shrinks)

"""KV cache goes to who is short of it, never from who uses it, and never to and fro."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.residency.arithmetic.resplit import comfortable_kv_bytes, is_restored, is_short, resplit, restore
from app.residency.arithmetic.tenants import DeviceShare, Tenant

DEVICE = DeviceShare("d", 1000, 0, 1.0)


def tenant(name: str, kv: int, used: int = 0, **changes: Any) -> Tenant:
    """A model that is awake, with 100 bytes besides its KV cache; busy if it uses some."""
    values: dict[str, Any] = {
        "device": "d", "state": "awake", "fixed_bytes": 100, "kv_bytes": kv, "kv_used_bytes": used,
        "least_kv_bytes": 50, "wanted_kv_bytes": 100, "most_kv_bytes": 10_000, "is_busy": used > 0,
        "last_used_at": 0.0,
    }  # fmt: skip
    return Tenant(name=name, **(values | changes))


def test_who_is_short_gets_what_is_free() -> None:
    assert resplit([tenant("a", 200, 190), tenant("b", 100)], DEVICE) == (("a", 300),)


def test_then_what_an_idle_model_does_not_use() -> None:
    full, idle = tenant("a", 400, 400, num_waiting=3), tenant("b", 400)
    assert resplit([full, idle], DEVICE) == (("b", 200), ("a", 600))


def test_an_idle_model_keeps_its_least() -> None:
    full, idle = tenant("a", 700, 700, num_waiting=3), tenant("b", 100)
    assert resplit([full, idle], DEVICE) == (("b", 50), ("a", 750))


def test_a_busy_model_gives_what_it_has_in_plenty() -> None:
    full, roomy = tenant("a", 400, 400), tenant("b", 400, 140)
    assert resplit([full, roomy], DEVICE) == (("b", 200), ("a", 600))
    assert resplit([full, replace(roomy, kv_used_bytes=280)], DEVICE) == ()


def test_two_full_models_leave_each_other_alone() -> None:
    assert resplit([tenant("a", 400, 400, num_waiting=9), tenant("b", 400, 390)], DEVICE) == ()


def test_a_share_is_lent_while_its_owner_is_idle_and_taken_back_when_it_is_not() -> None:
    owner, borrower = tenant("owner", 400, share=0.5), tenant("borrower", 400, 390)
    lent = dict(resplit([owner, borrower], DEVICE))
    assert lent == {"owner": 200, "borrower": 600}
    back = tenant("owner", 200, 195, share=0.5, num_waiting=1), tenant("borrower", 600, 350, num_waiting=5)
    assert resplit(back, DEVICE) == (("borrower", 400), ("owner", 400))


def test_a_share_is_not_taken_from_its_busy_owner() -> None:
    owner, other = tenant("owner", 400, 10, share=0.5), tenant("other", 400, 400, num_waiting=9)
    assert resplit([owner, other], DEVICE) == ()


def test_when_nobody_is_short_free_memory_goes_to_who_has_less_than_is_wanted() -> None:
    owner = tenant("owner", 100, share=0.4)
    assert resplit([owner, tenant("b", 60, last_used_at=5.0)], DEVICE) == (("b", 100), ("owner", 300))


def test_others_that_take_more_are_given_what_nobody_uses() -> None:
    crowded = replace(DEVICE, others_bytes=300)
    assert resplit([tenant("a", 400, 390), tenant("b", 400)], crowded) == (("b", 100),)


def test_nothing_is_moved_for_a_trifle() -> None:
    assert resplit([tenant("a", 640, 640, num_waiting=1), tenant("b", 159, 111)], DEVICE) == ()


def test_a_model_that_is_used_again_gets_back_what_its_traffic_wants() -> None:
    squeezed, idle = tenant("a", 50, wanted_kv_bytes=300), tenant("b", 700)
    assert restore("a", [squeezed, idle], DEVICE) == (("b", 500), ("a", 300))
    assert restore("a", [squeezed, tenant("b", 100)], DEVICE) == (("a", 300),)
    busy = tenant("b", 700, 600)
    assert restore("a", [squeezed, busy], DEVICE) == (("a", 100),), "what is free, and nothing of what is used"
    owner = tenant("a", 50, share=0.4)
    assert restore("a", [owner, idle], DEVICE) == (("b", 500), ("a", 300))
    assert restore("a", [tenant("a", 300, wanted_kv_bytes=300), idle], DEVICE) == ()


def test_requests_that_wait_beside_an_empty_cache_wait_for_something_else() -> None:
    assert not is_short(tenant("a", 400, 100, num_waiting=5))
    assert is_short(tenant("a", 400, 200, num_waiting=5))
    assert is_short(tenant("a", 100, 60, num_waiting=5, least_kv_bytes=50)), "less free than a conversation takes"
    assert not is_short(tenant("a", 400, 400, num_waiting=5, most_kv_bytes=400)), "it could not fill more"


def test_models_that_sleep_or_load_are_left_alone() -> None:
    asleep = tenant("b", 0, state="asleep", asleep_bytes=50)
    coming = tenant("c", 300, state="loading")
    assert resplit([tenant("a", 400, 390), asleep, coming], DEVICE) == (("a", 450),)


@st.composite
def crowds(draw: st.DrawFn) -> list[Tenant]:
    crowd = []
    for index in range(draw(st.integers(1, 5))):
        kv = draw(st.integers(0, 300))
        is_busy = draw(st.booleans())
        crowd.append(
            tenant(
                f"m{index}", kv, draw(st.integers(0, kv)) if is_busy else 0, is_busy=is_busy,
                state=draw(st.sampled_from(["awake", "awake", "awake", "asleep", "loading"])),
                least_kv_bytes=draw(st.integers(0, 60)), wanted_kv_bytes=draw(st.integers(0, 300)),
                most_kv_bytes=draw(st.integers(kv, 600)), share=draw(st.none() | st.sampled_from([0.1, 0.2, 0.4])),
                num_waiting=draw(st.integers(0, 3)) if is_busy else 0, last_used_at=float(draw(st.integers(0, 9))),
                asleep_bytes=20,
            )
        )  # fmt: skip
    return crowd


devices = st.builds(DeviceShare, st.just("d"), st.integers(500, 2500), st.integers(0, 300), st.just(0.92))


def carried_out(tenants: Sequence[Tenant], changes: tuple[tuple[str, int], ...]) -> list[Tenant]:
    kv = dict(changes)
    return [replace(one, kv_bytes=kv.get(one.name, one.kv_bytes)) for one in tenants]


@given(crowds(), devices)
def test_the_sum_stays_within_what_is_usable(tenants: list[Tenant], device: DeviceShare) -> None:
    held = sum(one.held_bytes for one in tenants)
    changes = resplit(tenants, device)
    after = sum(one.held_bytes for one in carried_out(tenants, changes))
    assert after <= max(held, device.usable_bytes)
    if held > device.usable_bytes:
        spare = sum(one.kv_bytes - one.needed_kv_bytes for one in tenants if one.state == "awake")
        assert after == max(device.usable_bytes, held - spare)


@given(crowds(), devices)
def test_nobody_gets_less_than_it_needs_or_more_than_it_can_fill(tenants: list[Tenant], device: DeviceShare) -> None:
    before = {one.name: one for one in tenants}
    changes = resplit(tenants, device)
    assert len(dict(changes)) == len(changes)
    for name, kv_bytes in changes:
        one = before[name]
        assert one.state == "awake"
        assert kv_bytes >= max(one.kv_used_bytes, min(one.kv_bytes, one.least_kv_bytes))
        assert kv_bytes <= max(one.kv_bytes, one.most_kv_bytes)
    steps = [kv_bytes - before[name].kv_bytes for name, kv_bytes in changes]
    assert 0 not in steps
    assert steps == sorted(steps, key=lambda step: step > 0), "what shrinks comes first"


@given(crowds(), devices)
def test_a_busy_owner_of_a_share_gives_nothing_of_it(tenants: list[Tenant], device: DeviceShare) -> None:
    if sum(one.held_bytes for one in tenants) > device.usable_bytes:
        return
    before = {one.name: one for one in tenants}
    for name, kv_bytes in resplit(tenants, device):
        one = before[name]
        if one.is_busy and one.share is not None and kv_bytes < one.kv_bytes:
            assert one.fixed_bytes + kv_bytes >= min(one.entitled_bytes(device), one.fixed_bytes + one.most_kv_bytes)


@given(crowds(), devices)
def test_the_same_traffic_comes_to_rest_and_nothing_is_passed_to_and_fro(
    tenants: list[Tenant], device: DeviceShare
) -> None:
    while sum(one.held_bytes for one in tenants) > device.usable_bytes and (changes := resplit(tenants, device)):
        tenants = carried_out(tenants, changes)
    directions: dict[str, set[bool]] = {one.name: set() for one in tenants}
    for _round in range(60):
        changes = resplit(tenants, device)
        if not changes:
            break
        before = {one.name: one.kv_bytes for one in tenants}
        for name, kv_bytes in changes:
            directions[name].add(kv_bytes > before[name])
        tenants = carried_out(tenants, changes)
    else:
        raise AssertionError("still moving after 60 rounds")
    both_ways = [name for name, ways in directions.items() if len(ways) == 2]
    assert both_ways == []


@given(crowds(), devices)
def test_an_owner_short_of_its_share_is_served_while_others_hold_more_than_theirs(
    tenants: list[Tenant], device: DeviceShare
) -> None:
    """At rest, an owner has its share back, or nobody has anything to give back."""
    if sum(one.held_bytes for one in tenants) > device.usable_bytes:
        return
    for _round in range(60):
        if not (changes := resplit(tenants, device)):
            break
        tenants = carried_out(tenants, changes)
    for owner in filter(is_short, tenants):
        missing = min(owner.entitled_bytes(device) - owner.fixed_bytes, owner.most_kv_bytes) - owner.kv_bytes
        if missing <= owner.kv_bytes // 32:
            continue
        for other in tenants:
            if other.state == "awake" and other.name != owner.name and is_short(other) and other.share is None:
                floor = max(other.kv_used_bytes, min(other.kv_bytes, other.least_kv_bytes))
                assert other.kv_bytes - floor < max(1, owner.kv_bytes // 32)


@given(crowds(), devices)
def test_restoring_one_takes_nothing_that_others_need(tenants: list[Tenant], device: DeviceShare) -> None:
    before = {one.name: one for one in tenants}
    changes = restore("m0", tenants, device)
    after = carried_out(tenants, changes)
    held = sum(one.held_bytes for one in tenants)
    assert sum(one.held_bytes for one in after) <= max(held, device.usable_bytes)
    for name, kv_bytes in changes:
        if name == "m0":
            assert before[name].kv_bytes < kv_bytes <= comfortable_kv_bytes(before[name], device)
        else:
            assert before[name].needed_kv_bytes <= kv_bytes < before[name].kv_bytes
    assert not is_restored(before["m0"], device) or not changes

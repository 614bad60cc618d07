"""Where a model goes and who makes room: no promise is broken, nobody leaves in vain, and each step is explained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.residency.arithmetic.placement import place, reshare, wake_placement
from app.residency.arithmetic.tenants import DeviceShare, Need, NoRoom, Placement, Shrink, Sleep, Tenant, Unload
from app.residency.arithmetic.victims import keep_value, may_leave

GIB = 2**30
NOW = 10_000.0
GPU = DeviceShare("cuda:0", 24 * GIB, 0, 0.92)


def tenant(name: str, fixed: float = 4, kv: float = 2, *, idle_s: float = 60, **changes: Any) -> Tenant:
    """A model that is awake; sizes in GiB."""
    values: dict[str, Any] = {
        "device": "cuda:0", "state": "awake", "fixed_bytes": int(fixed * GIB), "kv_bytes": int(kv * GIB),
        "least_kv_bytes": GIB, "wanted_kv_bytes": 2 * GIB, "most_kv_bytes": 100 * GIB,
        "weight_bytes": int(fixed * GIB) - GIB // 2, "load_seconds": 8.0, "last_used_at": NOW - idle_s,
    }  # fmt: skip
    return Tenant(name=name, **(values | changes))


def need(fixed: float, least_kv: float = 1, wanted_kv: float = 1) -> Need:
    return Need(int(fixed * GIB), int(least_kv * GIB), int(wanted_kv * GIB), 100 * GIB)


def place_new(wants: Need, tenants: Iterable[Tenant] = (), **changes: Any) -> Placement | NoRoom:
    values: dict[str, Any] = {
        "share": None, "device_wish": "auto", "devices": [GPU], "host_free_bytes": 64 * GIB, "now": NOW
    }  # fmt: skip
    return place("new", wants, tenants=tenants, **(values | changes))


def placed(outcome: Placement | NoRoom) -> Placement:
    assert isinstance(outcome, Placement), outcome.sentence
    return outcome


def refused(outcome: Placement | NoRoom) -> NoRoom:
    assert isinstance(outcome, NoRoom), outcome
    return outcome


def test_an_empty_device_gives_what_traffic_wants_and_keeps_the_rest() -> None:
    found = placed(place_new(need(4, wanted_kv=3)))
    assert found == Placement("cuda:0", 7 * GIB, 3 * GIB)


def test_a_share_is_the_whole_budget() -> None:
    found = placed(place_new(need(4, wanted_kv=3), share=0.65))
    assert (found.budget_bytes, found.kv_bytes) == (int(24 * GIB * 0.65), int(24 * GIB * 0.65) - 4 * GIB)


def test_the_reference_split_of_two_models() -> None:
    """0.65 and 0.25 of 24 GiB go together; a third 0.25 would make 1.15."""
    chat = tenant("chat", 12, 3.6, share=0.65, is_pinned=True)
    embedder = tenant("embedder", 5, 1, share=0.25, is_pinned=True)
    assert placed(place_new(need(5, 1), [chat], share=0.25)).actions == ()
    refusal = refused(place_new(need(5, 0.5), [chat, embedder], share=0.25))
    assert "needs 6.4 GB of cuda:0 (its share of 0.25)" in refusal.sentence
    assert "chat keeps 16.8 GB (pinned) and embedder keeps 6.4 GB (pinned)" in refusal.sentence
    assert not refusal.could_wait


def test_spare_cache_of_others_comes_before_anybody_leaves() -> None:
    found = placed(place_new(need(10, wanted_kv=2), [tenant("roomy", 4, 12)]))
    assert found.actions == (Shrink("roomy", int(24 * GIB * 0.92) - 16 * GIB),)
    assert found.budget_bytes == 12 * GIB
    assert found.reasons == (
        "roomy gave 6.4 GB of KV cache it does not use because new needs 12.9 GB of cuda:0 and 6.5 GB were free.",
    )


def test_the_least_recently_used_of_equals_is_put_to_sleep() -> None:
    tenants = [tenant(name, 6, 1, idle_s=idle_s, can_sleep=True) for name, idle_s in (("a", 60), ("b", 720), ("c", 9))]
    found = placed(place_new(need(5), tenants))
    assert found.actions == (Sleep("b"),)
    assert found.reasons == (
        "b was put to sleep (idle for 12 min) because new needs 6.4 GB of cuda:0 and 1.2 GB were free.",
    )


def test_without_host_memory_it_is_unloaded() -> None:
    tenants = [tenant("a", 16, 1, can_sleep=True)]
    assert placed(place_new(need(10), tenants, host_free_bytes=15 * GIB)).actions == (Unload("a"),)
    assert placed(place_new(need(10), tenants, host_free_bytes=16 * GIB)).actions == (Sleep("a"),)


def test_sleep_that_would_not_free_enough_is_an_unload() -> None:
    found = placed(place_new(need(20.5), [tenant("a", 16, 1, can_sleep=True, asleep_bytes=GIB)]))
    assert found.actions == (Unload("a"),)


def test_a_sleeper_makes_room_by_leaving_altogether() -> None:
    asleep = tenant("a", 16, 0, state="asleep", asleep_bytes=2 * GIB, idle_s=500)
    assert placed(place_new(need(20), [asleep])).actions == (Unload("a"),)


def test_the_smallest_set_that_suffices_leaves() -> None:
    """The tiny one was used longest ago, but without it there is room as well."""
    tenants = [tenant("tiny", 0.5, 0.5, idle_s=9000), tenant("large", 15, 1, idle_s=100), tenant("recent", 3, 1)]
    assert placed(place_new(need(14), tenants)).actions == (Unload("large"),)


def test_what_is_quickly_loaded_again_goes_first() -> None:
    slow = tenant("slow", 9, 1, idle_s=200, load_seconds=60)
    quick = tenant("quick", 9, 1, idle_s=100, load_seconds=2)
    assert placed(place_new(need(8), [slow, quick])).actions == (Unload("quick"),)


def test_models_in_use_are_waited_for() -> None:
    refusal = refused(place_new(need(10), [tenant("busy", 16, 1, is_busy=True)]))
    assert refusal.could_wait and refusal.short_bytes == 11 * GIB - int(24 * GIB * 0.92) + 17 * GIB
    assert refusal.sentence == (
        "new needs 11.8 GB of cuda:0 and 5.5 GB can be made free, since busy keeps 18.3 GB (busy); "
        "wait until one of them is idle."
    )
    loading = tenant("coming", 16, 1, state="loading")
    assert refused(place_new(need(10), [loading])).could_wait
    assert not refused(place_new(need(10), [tenant("kept", 16, 1, is_busy=True, is_pinned=True)])).could_wait


def test_a_model_that_is_too_large_for_the_device() -> None:
    refusal = refused(place_new(need(30)))
    assert refusal.least_share is None and not refusal.could_wait
    assert "needs at least 33.3 GB and models may have 23.7 GB of cuda:0 in all; choose a smaller" in refusal.sentence


def test_a_share_that_is_too_small_names_the_one_that_is_enough() -> None:
    refusal = refused(place_new(need(4), share=0.1))
    assert refusal.least_share == 0.21
    assert refusal.sentence == (
        "new needs at least 5.4 GB of cuda:0 and its share of 0.1 is 2.6 GB; a share of 0.21 is enough."
    )


def test_an_estimate_alone_refuses_nobody() -> None:
    """Only the weights are certain: with a share between those and the estimate, the worker may try."""
    estimated = replace(need(4), certain_bytes=3 * GIB)
    tried = placed(place_new(estimated, share=0.15))
    assert (tried.budget_bytes, tried.kv_bytes) == (int(24 * GIB * 0.15), 0)
    refusal = refused(place_new(estimated, share=0.1))
    assert "needs at least 3.2 GB" in refusal.sentence and "a share of 0.21 is enough" in refusal.sentence
    whole = placed(place_new(replace(need(30), certain_bytes=20 * GIB), [tenant("a", 4, 1)]))
    assert (whole.budget_bytes, whole.actions) == (int(24 * GIB * 0.92), (Unload("a"),))
    assert refused(place_new(replace(need(30), certain_bytes=23 * GIB))).least_share is None


def test_what_other_programs_hold_shortens_a_share() -> None:
    device = replace(GPU, others_bytes=4 * GIB)
    found = placed(place_new(need(4), share=0.9, devices=[device]))
    assert found.budget_bytes == device.usable_bytes
    assert found.reasons == ("new gets 19.4 GB of cuda:0 instead of 23.2 GB, because other programs hold the rest.",)


def test_other_programs_in_the_way_are_named() -> None:
    refusal = refused(place_new(need(4), devices=[replace(GPU, others_bytes=20 * GIB)]))
    assert "since other programs use 21.5 GB; stop other programs" in refusal.sentence


def test_nobody_is_told_to_stop_models_where_that_is_not_enough() -> None:
    device = replace(GPU, others_bytes=20 * GIB)
    refusal = refused(place_new(need(4), [tenant("a", 1, 1, is_busy=True)], devices=[device]))
    assert refusal.sentence.endswith(
        "; stop other programs that use the device, raise memory_limit, or choose a smaller model."
    )


def test_the_limit_is_named_where_it_alone_is_in_the_way() -> None:
    assert "; raise memory_limit, or choose a smaller model." in refused(place_new(need(23))).sentence
    assert "in all; choose a smaller model." in refused(place_new(need(30))).sentence


def test_a_lent_share_is_not_given_away() -> None:
    """The owner has 6 GiB less than its share; what is free belongs to it."""
    owner = tenant("owner", 4, 2, share=0.5, is_pinned=True)
    assert refused(place_new(need(11), [owner])).short_bytes == 12 * GIB + 12 * GIB - int(24 * GIB * 0.92)
    assert placed(place_new(need(9), [owner])).actions == ()


def test_the_device_where_nobody_has_to_leave() -> None:
    small, large = replace(GPU, name="cuda:1"), DeviceShare("cuda:2", 80 * GIB, 0, 0.92)
    tenants = [tenant("a", 18, 1), tenant("b", 70, 1, device="cuda:2")]
    assert placed(place_new(need(9), tenants, devices=[GPU, small, large])).device == "cuda:1"
    assert placed(place_new(need(9), devices=[GPU, small, large])).device == "cuda:2", "the one with most room"
    assert placed(place_new(need(9), devices=[GPU, small, large], device_wish="cuda:0")).device == "cuda:0"
    assert placed(place_new(need(9), devices=[GPU, large], device_wish="cuda")).device == "cuda:2"


def test_a_device_that_is_not_there() -> None:
    refusal = refused(place_new(need(1), device_wish="cuda:7"))
    assert refusal.sentence == "new is to run on cuda:7, which this machine does not have; it has cuda:0."


def test_a_sleeper_wakes_on_its_own_device() -> None:
    sleeper = tenant("a", 12, 0, state="asleep", asleep_bytes=GIB)
    other = tenant("b", 9, 1, can_sleep=True)
    found = wake_placement(sleeper, device=GPU, tenants=[sleeper, other], host_free_bytes=9 * GIB, now=NOW)
    assert placed(found).actions == (Sleep("b"),)
    assert placed(found).budget_bytes == 14 * GIB


def test_a_new_share_takes_unused_cache_but_nobody_leaves() -> None:
    chat, other = tenant("chat", 8, 4, share=0.5), tenant("other", 5, 4)
    grown = placed(reshare(chat, 0.6, device=GPU, tenants=[chat, other], now=NOW))
    assert grown.budget_bytes == int(24 * GIB * 0.6)
    assert grown.actions == (Shrink("other", int(24 * GIB * 0.92) - int(24 * GIB * 0.6) - 5 * GIB),)
    refusal = refused(reshare(chat, 0.8, device=GPU, tenants=[chat, other], now=NOW))
    assert "other keeps 6.4 GB (awake); there is room for a share of 0.67." in refusal.sentence
    assert not refusal.could_wait


def test_a_smaller_share_keeps_what_requests_hold() -> None:
    chat = tenant("chat", 8, 6, kv_used_bytes=5 * GIB, is_busy=True, share=0.6)
    found = placed(reshare(chat, 0.4, device=GPU, tenants=[chat], now=NOW))
    assert (found.budget_bytes, found.kv_bytes) == (13 * GIB, 5 * GIB)


# Small numbers make boundaries meet.
sizes = st.integers(0, 12)
devices = st.builds(
    DeviceShare, st.just("d"), st.integers(1, 60), st.integers(0, 20), st.sampled_from([0.5, 0.92, 1.0])
)
needs = st.builds(
    lambda fixed, least, wanted, most, certain: Need(fixed, least, least + wanted, least + wanted + most, certain),
    st.integers(0, 40), sizes, sizes, sizes, st.none() | st.integers(0, 40),
)  # fmt: skip


@st.composite
def crowds(draw: st.DrawFn) -> list[Tenant]:
    crowd = []
    for index in range(draw(st.integers(0, 6))):
        state = draw(st.sampled_from(["awake", "awake", "asleep", "loading"]))
        kv, fixed = (0 if state == "asleep" else draw(sizes)), draw(sizes)
        crowd.append(
            Tenant(
                name=f"m{index}", device="d", state=state, fixed_bytes=fixed, kv_bytes=kv,
                kv_used_bytes=draw(st.integers(0, kv)), least_kv_bytes=draw(sizes), wanted_kv_bytes=draw(sizes),
                most_kv_bytes=40, asleep_bytes=draw(st.integers(0, fixed)), weight_bytes=draw(st.integers(0, fixed)),
                share=draw(st.none() | st.sampled_from([0.1, 0.3, 0.5])), is_pinned=draw(st.booleans()),
                is_busy=draw(st.booleans()), last_used_at=NOW - draw(st.integers(0, 500)),
                load_seconds=draw(st.sampled_from([0.0, 2.0, 9.0])), can_sleep=draw(st.booleans()),
            )
        )  # fmt: skip
    return crowd


def carried_out(tenants: Sequence[Tenant], placement: Placement) -> list[Tenant]:
    """The models after all actions of a placement."""
    after = {tenant.name: tenant for tenant in tenants}
    for action in placement.actions:
        match action:
            case Shrink(name, kv_bytes):
                assert after[name].state == "awake" and kv_bytes < after[name].kv_bytes
                after[name] = replace(after[name], kv_bytes=kv_bytes)
            case Sleep(name):
                assert after[name].can_sleep and after[name].state == "awake"
                after[name] = replace(after[name], state="asleep", kv_bytes=0)
            case Unload(name):
                del after[name]
    return list(after.values())


def squeeze(tenant: Tenant, device: DeviceShare) -> int:
    """What a model that stays can give at most."""
    if tenant.state != "awake":
        return 0
    kept = max(tenant.needed_kv_bytes, tenant.entitled_bytes(device) - tenant.fixed_bytes)
    return max(0, tenant.kv_bytes - kept)


def room_without(gone: set[str], tenants: Sequence[Tenant], device: DeviceShare) -> int:
    """What there is for a newcomer when some models have left and the others give all they can."""
    room = device.limit_bytes - device.others_bytes
    for one in tenants:
        if one.name not in gone:
            room -= one.reserved_bytes(device) - squeeze(one, device)
    return room


shares = st.none() | st.sampled_from([0.05, 0.2, 0.4, 0.9])
hosts = st.integers(0, 20)


@given(needs, shares, devices, crowds(), hosts)
def test_no_device_is_promised_beyond_what_is_usable(
    wants: Need, share: float | None, device: DeviceShare, tenants: list[Tenant], host: int
) -> None:
    found = place_new(wants, tenants, share=share, devices=[device], host_free_bytes=host)
    if isinstance(found, NoRoom):
        return
    after = carried_out(tenants, found)
    reserved = sum(one.reserved_bytes(device) for one in after)
    assert reserved + found.budget_bytes <= device.usable_bytes
    assert found.budget_bytes >= wants.refused_below_bytes
    if wants.certain_bytes is None:
        assert found.budget_bytes >= wants.fixed_bytes + max(found.kv_bytes, wants.least_kv_bytes)
    if share is not None:
        assert found.budget_bytes <= device.share_bytes(share)
    assert 0 <= found.kv_bytes <= wants.most_kv_bytes


@given(needs, shares, devices, crowds(), hosts)
def test_nobody_loses_what_it_needs(
    wants: Need, share: float | None, device: DeviceShare, tenants: list[Tenant], host: int
) -> None:
    found = place_new(wants, tenants, share=share, devices=[device], host_free_bytes=host)
    if isinstance(found, NoRoom):
        return
    before = {one.name: one for one in tenants}
    for action in found.actions:
        one = before[action.name]
        if isinstance(action, Shrink):
            assert action.kv_bytes >= max(one.kv_used_bytes, min(one.kv_bytes, one.least_kv_bytes))
            assert one.fixed_bytes + action.kv_bytes >= min(one.held_bytes, one.entitled_bytes(device))
        else:
            assert not one.is_pinned and not one.is_busy and one.state != "loading"
    sleeping = [before[action.name] for action in found.actions if isinstance(action, Sleep)]
    assert sum(one.weight_bytes for one in sleeping) <= host
    assert len({action.name for action in found.actions}) == len(found.actions)


@given(needs, shares, devices, crowds(), hosts)
def test_nobody_leaves_in_vain_nor_in_place_of_one_of_less_value(
    wants: Need, share: float | None, device: DeviceShare, tenants: list[Tenant], host: int
) -> None:
    found = place_new(wants, tenants, share=share, devices=[device], host_free_bytes=host)
    if isinstance(found, NoRoom):
        return
    gone = {action.name for action in found.actions if not isinstance(action, Shrink)}
    least = min(wants.least_bytes, device.limit_bytes)
    if share is not None:
        full = device.share_bytes(share)
        # A share that other programs shorten was not to be had in full, whoever left.
        least = full if found.budget_bytes == full else max(least, full - device.others_bytes)
    for name in gone:
        assert room_without(gone - {name}, tenants, device) < least, f"{name} could have stayed"

    def freed(one: Tenant) -> int:
        return one.reserved_bytes(device) - squeeze(one, device)

    staying = [one for one in tenants if one.name not in gone and may_leave(one)]
    for victim in (one for one in tenants if one.name in gone):
        for other in staying:
            if freed(other) >= freed(victim):
                assert keep_value(other, NOW) >= keep_value(victim, NOW), f"{other.name} is worth less"


@given(needs, shares, devices, crowds())
def test_a_refusal_is_true(wants: Need, share: float | None, device: DeviceShare, tenants: list[Tenant]) -> None:
    found = place_new(wants, tenants, share=share, devices=[device])
    if isinstance(found, Placement):
        return
    least = device.share_bytes(share) if share is not None else min(wants.least_bytes, device.limit_bytes)
    everybody = {one.name for one in tenants if may_leave(one)}
    if wants.refused_below_bytes <= min(least, device.limit_bytes):
        assert room_without(everybody, tenants, device) < least
    idle = [replace(one, is_busy=False, kv_used_bytes=0) for one in tenants]
    not_kept = {one.name for one in tenants if not one.is_pinned}
    if found.could_wait:
        assert room_without(not_kept, idle, device) >= least
    if found.least_share is not None:
        alone = replace(device, others_bytes=0)
        assert isinstance(place_new(wants, share=found.least_share, devices=[alone]), Placement)
        if wants.certain_bytes is None and found.least_share >= 0.02:
            less = round(found.least_share - 0.01, 2)
            assert isinstance(place_new(wants, share=less, devices=[alone]), NoRoom)


@given(needs, shares, devices, crowds(), hosts)
def test_each_step_is_one_sentence(
    wants: Need, share: float | None, device: DeviceShare, tenants: list[Tenant], host: int
) -> None:
    found = place_new(wants, tenants, share=share, devices=[device], host_free_bytes=host)
    if isinstance(found, NoRoom):
        sentences: tuple[str, ...] = (found.sentence,)
        assert "; " in found.sentence, "what happened; what to do next"
    else:
        sentences = found.reasons
        assert len(sentences) >= len(found.actions)
        for action, sentence in zip(found.actions, sentences, strict=False):
            assert sentence.startswith(f"{action.name} ") and "new needs" in sentence
    for sentence in sentences:
        assert sentence.endswith(".") and ". " not in sentence and "new" in sentence


@given(needs, st.lists(crowds(), min_size=2, max_size=3))
def test_of_several_devices_none_is_passed_over_where_nobody_has_to_leave(
    wants: Need, crowd: list[list[Tenant]]
) -> None:
    machines = [DeviceShare(f"cuda:{index}", 40, 0, 0.92) for index in range(len(crowd))]
    tenants = [
        replace(one, device=machine.name, name=f"{machine.name} {one.name}")
        for machine, several in zip(machines, crowd, strict=True)
        for one in several
    ]
    found = place_new(wants, tenants, devices=machines)
    alone = [place_new(wants, tenants, devices=[machine]) for machine in machines]
    assert isinstance(found, Placement) == any(isinstance(one, Placement) for one in alone)
    if isinstance(found, Placement):
        assert found in alone
        untouched = any(isinstance(one, Placement) and not one.actions for one in alone)
        assert not (untouched and found.actions)


@pytest.mark.parametrize("share", [0.01, 0.29, 0.57, 0.92])
def test_the_share_of_a_share_is_itself(share: float) -> None:
    size = GPU.share_bytes(share)
    assert GPU.share_of(size) == GPU.share_within(size) == share
    assert GPU.share_of(size + 1) == round(share + 0.01, 2)
    assert GPU.share_within(size - 1) == round(share - 0.01, 2)

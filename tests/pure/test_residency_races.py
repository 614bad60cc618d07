"""Bad moments: a worker dies, a client leaves, somebody stops a model or thinks again, other programs take memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from app.errors import ModelInUse, ModelNotLoaded, ShuttingDown
from app.residency.model_state import State
from app.residency.slot import LONGEST_WAIT_S
from app.residency_settings import ResidentSettings
from app.resident_models import load_residents
from app.settings import Settings
from engine.api.errors import InsufficientMemory, WorkerDied
from tests.fakes.fleet import BLOCK_BYTES, GIB, FakeModel, Fleet, fleet_of
from tests.pure.test_supervisor import kinds, names, now, play, state_of, whys


async def until(condition: Callable[[], bool]) -> None:
    """Wait for the very step in which something becomes true."""
    for number in range(100_000):
        if condition():
            return
        await asyncio.sleep(0 if number % 20 else 0.01)
    raise AssertionError("it never became true")


def has_state(fleet: Fleet, name: str, state: State) -> Callable[[], bool]:
    return lambda: any(one.state == state for one in fleet.supervisor.states() if one.name == name)


# -- kill -9 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1, 0.19])
def test_a_victim_that_is_killed_makes_room_all_the_same(after_s: float) -> None:
    fleet = fleet_of(3)

    async def scene() -> None:
        for name in ("m0", "m1"):
            await fleet.ask(name)
        asking = asyncio.create_task(fleet.ask("m2"))
        await until(has_state(fleet, "m0", "draining"))
        await asyncio.sleep(after_s)
        fleet.workers[0].kill()
        await asking
        await fleet.ask("m0")

    play(fleet, scene())
    assert fleet.models["m0"].num_loads == 2
    assert fleet.models["m2"].num_loads == 1


def test_a_worker_that_is_killed_while_it_loads_costs_everybody_in_line_one_error() -> None:
    fleet = fleet_of(1)
    fleet.models["m0"].load_error = WorkerDied("The model's worker process ended (signal SIGKILL).")

    async def scene() -> None:
        outcomes = await asyncio.gather(*(fleet.ask("m0") for _ in range(4)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [WorkerDied] * 4
        assert list(fleet.supervisor.ledger) == []
        fleet.models["m0"].load_error = None
        await fleet.ask("m0")

    play(fleet, scene())
    assert fleet.models["m0"].num_loads == 2


def test_a_worker_that_is_killed_while_its_cache_is_resized_takes_the_promise_along() -> None:
    fleet = fleet_of(2, devices={"cuda:0": 12 * GIB})

    async def scene() -> None:
        for name in ("m0", "m1"):
            await fleet.load_model(name)
        sharing = asyncio.create_task(fleet.supervisor.set_share("m1", 0.5))
        await asyncio.sleep(0.02)
        fleet.workers[1].kill()
        with pytest.raises(WorkerDied):
            await sharing
        await asyncio.sleep(0.5)
        assert [entry.name for entry in fleet.supervisor.ledger] == ["m0"]
        await fleet.ask("m1")
        assert state_of(fleet, "m1").share is None, "a share that was not given"

    play(fleet, scene())


@pytest.mark.parametrize("kill_after_s", [0.0, 0.1])
def test_a_worker_that_is_killed_while_somebody_puts_it_to_sleep(kill_after_s: float) -> None:
    fleet = fleet_of(1)

    async def scene() -> None:
        await fleet.ask("m0")
        sleeping = asyncio.create_task(fleet.supervisor.sleep("m0"))
        await until(has_state(fleet, "m0", "draining"))
        await asyncio.sleep(kill_after_s)
        fleet.workers[0].kill()
        with pytest.raises((WorkerDied, ModelNotLoaded)):
            await sleeping
        await fleet.ask("m0")

    play(fleet, scene())


# -- leaving and stopping ------------------------------------------------------------------------------------------


def test_a_client_that_leaves_while_its_model_loads_leaves_a_model_that_serves_the_next() -> None:
    fleet = fleet_of(1, keep_alive=60.0)

    async def scene() -> None:
        asking = asyncio.create_task(fleet.ask("m0"))
        await asyncio.sleep(1)
        asking.cancel()
        await asyncio.sleep(5)
        assert state_of(fleet, "m0").state == "ready"
        assert state_of(fleet, "m0").until is not None
        await fleet.ask("m0")
        assert fleet.models["m0"].num_loads == 1
        await asyncio.sleep(61)
        assert names(fleet) == set()

    play(fleet, scene())


def test_stopping_a_load_twice_waits_for_its_worker_to_end() -> None:
    """The second stop, as one by an impatient person, does not break off the end of the worker."""
    fleet = fleet_of(1)

    async def scene() -> None:
        asking = asyncio.create_task(fleet.ask("m0"))
        await asyncio.sleep(1)
        first = asyncio.create_task(fleet.supervisor.stop("m0"))
        await asyncio.sleep(0.1)
        await fleet.supervisor.stop("m0")
        assert await first
        assert fleet.num_breaking_off == 0
        with pytest.raises(WorkerDied, match="stopped"):
            await asking
        assert list(fleet.supervisor.ledger) == []

    play(fleet, scene())


def test_shutting_down_refuses_who_waits_at_once_and_lets_open_requests_finish() -> None:
    fleet = fleet_of(2, devices={"cuda:0": 12 * GIB})

    async def scene() -> None:
        await fleet.load_model("m0")
        busy = asyncio.create_task(fleet.ask("m0", seconds=2.0))
        waiting = asyncio.create_task(fleet.ask("m1"))
        await asyncio.sleep(0.5)
        began_at = now()
        closing = asyncio.create_task(fleet.supervisor.close())
        with pytest.raises(ShuttingDown):
            await waiting
        assert now() == began_at
        for asking in (fleet.ask("m1"), fleet.supervisor.wake("m0"), fleet.supervisor.sleep("m0")):
            with pytest.raises(ShuttingDown):
                await asking
        await busy
        await closing

    play(fleet, scene())


def test_two_names_of_the_same_files_share_a_load_and_one_can_be_stopped() -> None:
    models = {name: FakeModel(name, files="same") for name in ("a", "b")}
    fleet = Fleet(models, {"cuda:0": 6 * GIB}, Settings())

    async def scene() -> None:
        asking = [asyncio.create_task(fleet.ask(name)) for name in ("a", "b", "a")]
        await asyncio.sleep(1)
        assert state_of(fleet, "b").names == ("a", "b")
        assert await fleet.supervisor.stop("b")
        await asyncio.gather(*asking)
        assert state_of(fleet, "a").names == ("a",)
        assert sum(model.num_loads for model in models.values()) == 1

    play(fleet, scene())


def test_keep_alive_of_nothing_unloads_when_the_last_request_is_done() -> None:
    fleet = fleet_of(1)

    async def scene() -> None:
        await fleet.load_model("m0")
        asking = [asyncio.create_task(fleet.ask("m0", seconds=seconds, keep_alive=0.0)) for seconds in (1, 3, 2)]
        await asyncio.sleep(2.5)
        assert state_of(fleet, "m0").state == "ready"
        await asyncio.gather(*asking)
        await asyncio.sleep(0.5)
        assert names(fleet) == set()

    play(fleet, scene())
    assert fleet.models["m0"].num_loads == 1


# -- changes of mind -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["share", "load"])
def test_a_share_for_a_model_that_loads_is_in_force_when_it_is_there(how: str) -> None:
    fleet = fleet_of(1, devices={"cuda:0": 12 * GIB})

    async def scene() -> None:
        asking = asyncio.create_task(fleet.ask("m0"))
        await asyncio.sleep(1)
        if how == "share":
            await fleet.supervisor.set_share("m0", 0.4)
        else:
            await fleet.load_model("m0", share=0.4)
        assert state_of(fleet, "m0").share_in_force == pytest.approx(0.4, abs=0.01)
        await asking

    play(fleet, scene())
    assert fleet.models["m0"].num_loads == 1


def test_a_share_counts_also_where_somebody_waits_already() -> None:
    """The room for a model may have been found in the very moment that somebody gives it another share."""
    fleet = fleet_of(1, devices={"cuda:0": 12 * GIB})

    async def scene() -> None:
        asking = asyncio.create_task(fleet.ask("m0"))
        await asyncio.sleep(0)
        assert state_of(fleet, "m0").state == "waiting"
        await fleet.load_model("m0", share=0.4)
        assert state_of(fleet, "m0").share == 0.4
        assert state_of(fleet, "m0").share_in_force == pytest.approx(0.4, abs=0.01)
        await asking

    play(fleet, scene())


def test_a_share_that_is_not_enough_is_refused_and_forgotten() -> None:
    fleet = fleet_of(1)

    async def scene() -> None:
        with pytest.raises(InsufficientMemory, match=r"share of 0.35 is enough"):
            await fleet.load_model("m0", share=0.1)
        await fleet.ask("m0")
        with pytest.raises(InsufficientMemory, match=r"share of 0.35 is enough"):
            await fleet.supervisor.set_share("m0", 0.1)
        await fleet.supervisor.sleep("m0")
        with pytest.raises(InsufficientMemory, match=r"share of 0.35 is enough"):
            await fleet.supervisor.set_share("m0", 0.1)
        await fleet.supervisor.set_share("m0", 0.4)
        await fleet.ask("m0")
        assert state_of(fleet, "m0").share_in_force == pytest.approx(0.4, abs=0.01)

    play(fleet, scene())
    assert kinds(fleet).count("refuse") == 3
    assert "fail" not in kinds(fleet)


def test_sleep_waits_for_a_load_and_a_request_that_comes_meanwhile_is_served() -> None:
    fleet = fleet_of(1)

    async def scene() -> None:
        first = asyncio.create_task(fleet.ask("m0", seconds=2.0))
        await asyncio.sleep(1)
        sleeping = [asyncio.create_task(fleet.supervisor.sleep("m0")) for _ in range(2)]
        await until(has_state(fleet, "m0", "draining"))
        second = asyncio.create_task(fleet.ask("m0"))
        await asyncio.gather(first, *sleeping, second)
        assert state_of(fleet, "m0").state == "ready"

    play(fleet, scene())
    assert fleet.models["m0"].num_loads == 1
    assert fleet.models["m0"].num_wakes == 1


def test_a_model_whose_turn_is_over_can_be_put_to_sleep_by_hand() -> None:
    fleet = fleet_of(3)

    async def scene() -> None:
        await fleet.load_model("m1", pin=True)
        await fleet.ask("m0")
        busy = asyncio.create_task(fleet.ask("m0", seconds=20))
        await asyncio.sleep(1)
        claimant = asyncio.create_task(fleet.ask("m2"))
        await until(has_state(fleet, "m0", "draining"))
        sleeping = asyncio.create_task(fleet.supervisor.sleep("m0"))
        await asyncio.sleep(1)
        claimant.cancel()
        await asyncio.gather(busy, sleeping)
        assert state_of(fleet, "m0").state == "asleep"

    play(fleet, scene())


@pytest.mark.parametrize("what", ["set_share", "pin", "sleep", "wake", "stop"])
def test_any_name_of_a_model_will_do(what: str) -> None:
    fleet = fleet_of(1)
    fleet.aliases = {"nick": "m0"}
    arguments = {"set_share": (0.6,), "pin": (True,)}.get(what, ())

    async def scene() -> None:
        await fleet.load_model("m0")
        await getattr(fleet.supervisor, what)("nick", *arguments)
        if what != "stop":
            assert (await fleet.supervisor.state("nick"))[0] == "m0"

    play(fleet, scene())


def test_residents_may_be_named_by_an_alias_and_say_why_they_are_loaded() -> None:
    residents = (ResidentSettings(model="nick", share=0.45, pin=True), ResidentSettings(model="m1"))
    fleet = fleet_of(2, residents=residents)
    fleet.aliases = {"nick": "m0"}

    async def scene() -> None:
        await load_residents(residents, fleet.supervisor)
        assert state_of(fleet, "m0").share == 0.45
        assert state_of(fleet, "m0").is_pinned

    play(fleet, scene())
    loads = [event for event in fleet.supervisor.events.after() if event.kind == "load"]
    assert [event.model for event in loads] == ["m0", "m1"]
    assert all(event.why.startswith("The settings want it in memory from the start. It may take") for event in loads)


# -- waiting -------------------------------------------------------------------------------------------------------


def test_who_loads_by_hand_hears_what_the_model_waits_for() -> None:
    fleet = fleet_of(3)

    async def scene() -> None:
        await fleet.load_model("m1", pin=True)
        busy = asyncio.create_task(fleet.ask("m0", seconds=10))
        await asyncio.sleep(6)
        stages = [progress.stage for progress in await fleet.load_model("m2")]
        await busy
        assert stages[0] == "looking for room"
        assert "m0 keeps" in stages[1] and "(busy)" in stages[1]
        assert stages[-1] == "loading weights"

    play(fleet, scene())


def test_nobody_waits_for_ever_for_a_model_that_is_never_idle() -> None:
    fleet = fleet_of(3)

    async def scene() -> None:
        await fleet.load_model("m1", pin=True)
        await fleet.ask("m0")
        endless = asyncio.create_task(fleet.ask("m0", seconds=10 * LONGEST_WAIT_S))
        early = asyncio.create_task(fleet.ask("m2"))
        await asyncio.sleep(LONGEST_WAIT_S - 60)
        late = asyncio.create_task(fleet.ask("m2"))
        with pytest.raises(InsufficientMemory, match=r"Its turn did not come within 30 min: .*m0 keeps"):
            await early
        assert not late.done()
        late.cancel()
        await fleet.ask("m0")
        endless.cancel()

    play(fleet, scene())
    assert "did not come" in whys(fleet, "refuse")[0]


def test_nobody_waits_for_ever_for_a_model_that_is_to_sleep() -> None:
    fleet = fleet_of(1)

    async def scene() -> None:
        await fleet.ask("m0")
        endless = asyncio.create_task(fleet.ask("m0", seconds=10 * LONGEST_WAIT_S))
        await asyncio.sleep(1)
        sleeping = asyncio.create_task(fleet.supervisor.sleep("m0"))
        await asyncio.sleep(1)
        asking = asyncio.create_task(fleet.ask("m0"))
        with pytest.raises(ModelInUse, match="goes on serving"):
            await sleeping
        await asking
        endless.cancel()

    play(fleet, scene())


def test_who_waits_behind_a_model_that_gave_up_is_next() -> None:
    fleet = fleet_of(4)

    async def scene() -> None:
        await fleet.load_model("m1", pin=True)
        await fleet.ask("m0")
        endless = asyncio.create_task(fleet.ask("m0", seconds=10 * LONGEST_WAIT_S))
        await asyncio.sleep(1)
        first = asyncio.create_task(fleet.ask("m2"))
        await asyncio.sleep(60)
        second = asyncio.create_task(fleet.ask("m3"))
        for asking in (first, second):
            with pytest.raises(InsufficientMemory, match="did not come"):
                await asking
        endless.cancel()

    play(fleet, scene())


# -- other programs ------------------------------------------------------------------------------------------------


def test_what_another_program_takes_comes_out_of_unused_cache_and_comes_back() -> None:
    models = [FakeModel("chat", fixed_bytes=GIB, wanted_blocks=3000)]
    fleet = Fleet({model.name: model for model in models}, {"cuda:0": 6 * GIB}, Settings())

    async def scene() -> None:
        await fleet.load_model("chat")
        asking = asyncio.create_task(fleet.ask("chat", seconds=60, blocks=100))
        fleet.others_bytes["cuda:0"] = 3 * GIB
        await asyncio.sleep(15)
        held = state_of(fleet, "chat").size_bytes
        assert held <= fleet.devices["cuda:0"] * 0.92 - 3 * GIB
        assert held >= GIB + 100 * BLOCK_BYTES
        fleet.others_bytes["cuda:0"] = 0
        await asyncio.sleep(30)
        assert state_of(fleet, "chat").kv_bytes == 3000 * BLOCK_BYTES
        await asking

    play(fleet, scene())
    assert models[0].num_loads == 1


def test_what_another_program_holds_is_no_room_for_a_model() -> None:
    fleet = fleet_of(2, devices={"cuda:0": 6 * GIB})

    async def scene() -> None:
        await fleet.load_model("m0", pin=True)
        fleet.others_bytes["cuda:0"] = 3 * GIB
        with pytest.raises(InsufficientMemory, match=r"other programs use 3.2 GB"):
            await fleet.ask("m1")
        fleet.others_bytes["cuda:0"] = 0
        await fleet.ask("m1")
        assert state_of(fleet, "m0").state == "ready"

    play(fleet, scene())

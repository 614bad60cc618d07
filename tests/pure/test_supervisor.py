"""The supervisor and its parts with workers that are numbers, in virtual time: who comes, waits, sleeps and leaves."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from app.errors import ModelNotLoaded, QueueFull
from app.residency.model_state import ModelState
from app.residency_settings import ResidentSettings
from app.settings import Settings
from engine.api.errors import BrokenCheckpoint, InsufficientMemory, WorkerDied
from tests.fakes.fleet import BLOCK_BYTES, GIB, FakeModel, FakeWorker, Fleet, fleet_of
from tests.fakes.virtual_time import run


def kinds(fleet: Fleet, model: str | None = None) -> list[str]:
    """What happened, in order."""
    return [event.kind for event in fleet.supervisor.events.after() if model in (None, event.model)]


def whys(fleet: Fleet, kind: str) -> list[str]:
    """The reasons of all events of this kind."""
    return [event.why for event in fleet.supervisor.events.after() if event.kind == kind]


def state_of(fleet: Fleet, name: str) -> ModelState:
    return next(state for state in fleet.supervisor.states() if name in state.names)


def names(fleet: Fleet) -> set[str]:
    return {name for state in fleet.supervisor.states() for name in state.names}


def now() -> float:
    return asyncio.get_running_loop().time()


def play(fleet: Fleet, scene: Coroutine[Any, Any, None]) -> None:
    """Run a scene to its end and close the daemon; the ledger adds up before and is empty after."""

    async def all_of_it() -> None:
        await scene
        fleet.check()
        await fleet.supervisor.close()

    run(all_of_it())
    assert list(fleet.supervisor.ledger) == []
    assert fleet.alive() == []
    assert fleet.num_breaking_off == 0


def test_requests_for_one_cold_model_share_a_load_and_others_go_on() -> None:
    fleet = fleet_of(2)

    async def scene() -> None:
        await fleet.ask("m0")
        cold = [asyncio.create_task(fleet.ask("m1")) for _ in range(5)]
        await asyncio.sleep(1)
        began_at = now()
        await fleet.ask("m0", seconds=0.5)
        assert now() - began_at == pytest.approx(0.5)
        assert state_of(fleet, "m1").state == "loading"
        assert state_of(fleet, "m1").num_waiting == 5
        await asyncio.gather(*cold)

    play(fleet, scene())
    assert [model.num_loads for model in fleet.models.values()] == [1, 1]


def test_a_failed_load_is_told_to_all_who_wait_and_not_repeated() -> None:
    fleet = fleet_of(1)
    fleet.models["m0"].load_error = BrokenCheckpoint("It lacks tensors; pull it again.")

    async def scene() -> None:
        outcomes = await asyncio.gather(*(fleet.ask("m0") for _ in range(8)), return_exceptions=True)
        assert {str(outcome) for outcome in outcomes} == {"It lacks tensors; pull it again."}
        assert fleet.models["m0"].num_loads == 1
        assert state_of(fleet, "m0").state == "failed"
        assert "lacks tensors" in state_of(fleet, "m0").note
        fleet.models["m0"].load_error = None
        await fleet.ask("m0")
        assert state_of(fleet, "m0").note == ""

    play(fleet, scene())
    assert kinds(fleet) == ["load", "fail", "load", "ready", "unload"]


def test_why_a_model_failed_is_forgotten_after_a_while() -> None:
    fleet = fleet_of(1, keep_alive=60.0)
    fleet.models["m0"].load_error = BrokenCheckpoint("It lacks tensors; pull it again.")

    async def scene() -> None:
        with pytest.raises(BrokenCheckpoint):
            await fleet.ask("m0")
        await asyncio.sleep(59)
        assert names(fleet) == {"m0"}
        await asyncio.sleep(2)
        assert names(fleet) == set()

    play(fleet, scene())


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    fleet = fleet_of(1, max_queue=3)
    fleet.models["m0"].load_s = 12.0

    async def scene() -> None:
        await fleet.load_model("m0", pin=True)
        fleet.workers[0].kill()
        await asyncio.sleep(1)
        waiting = [asyncio.create_task(fleet.ask("m0", seconds=5)) for _ in range(3)]
        await asyncio.sleep(1)
        with pytest.raises(QueueFull) as loading:
            await fleet.ask("m0")
        await asyncio.sleep(12)
        with pytest.raises(QueueFull) as full:
            await fleet.ask("m0")
        await asyncio.gather(*waiting)
        assert loading.value.headers == {"Retry-After": "12"}
        assert full.value.headers == {"Retry-After": "1"}

    play(fleet, scene())


def test_the_least_recently_used_idle_model_sleeps_and_wakes() -> None:
    fleet = fleet_of(3)

    async def scene() -> None:
        for name in ("m0", "m1", "m0", "m2"):
            await fleet.ask(name)
        assert state_of(fleet, "m1").state == "asleep"
        assert state_of(fleet, "m1").host_bytes > 0
        began_at = now()
        await fleet.ask("m1")
        assert now() - began_at < 2.0

    play(fleet, scene())
    assert kinds(fleet, "m1")[:4] == ["load", "ready", "sleep", "wake"]
    assert fleet.models["m1"].num_loads == 1
    assert "m1 was put to sleep" in whys(fleet, "sleep")[0]


def test_without_host_memory_the_victim_is_unloaded() -> None:
    fleet = fleet_of(3)
    fleet.host_bytes = 0

    async def scene() -> None:
        for name in ("m0", "m1", "m2"):
            await fleet.ask(name)
        assert names(fleet) == {"m1", "m2"}

    play(fleet, scene())
    assert "evict" in kinds(fleet, "m0")
    assert "because m2 needs" in whys(fleet, "evict")[0]


def test_pinned_and_busy_models_stay() -> None:
    fleet = fleet_of(3)

    async def scene() -> None:
        await fleet.load_model("m0", pin=True)
        busy = asyncio.create_task(fleet.ask("m1", seconds=3))
        await asyncio.sleep(6)
        third = asyncio.create_task(fleet.ask("m2"))
        await asyncio.sleep(1)
        assert state_of(fleet, "m2").state == "waiting"
        assert "keeps" in state_of(fleet, "m2").note
        await asyncio.gather(busy, third)
        assert state_of(fleet, "m0").state == "ready"
        assert state_of(fleet, "m1").state == "asleep"

    play(fleet, scene())


def test_a_model_that_only_pinned_ones_keep_out_is_refused_at_once() -> None:
    fleet = fleet_of(3)

    async def scene() -> None:
        await fleet.load_model("m0", pin=True)
        await fleet.load_model("m1", pin=True)
        with pytest.raises(InsufficientMemory, match="pinned"):
            await fleet.ask("m2")

    play(fleet, scene())


def test_a_resident_that_is_always_busy_is_drained_for_one_that_waits() -> None:
    fleet = fleet_of(3)
    ended: list[str] = []

    async def stream(name: str) -> None:
        """A client that asks again and again, without a pause."""
        while now() < 1060.0:
            await fleet.ask(name, seconds=3.0)
        ended.append(name)

    async def scene() -> None:
        streams = [asyncio.create_task(stream(name)) for name in ("m0", "m0", "m1", "m1")]
        await asyncio.sleep(20)
        began_at = now()
        await fleet.ask("m2")
        assert now() - began_at < 15.0
        await asyncio.gather(*streams)

    play(fleet, scene())
    assert "drain" in kinds(fleet)
    assert "it is its turn" in whys(fleet, "drain")[0]
    assert len(ended) == 4


def test_a_drain_ends_when_nobody_waits_any_more() -> None:
    fleet = fleet_of(3)

    async def scene() -> None:
        await fleet.load_model("m1", pin=True)
        await fleet.ask("m0")
        busy = asyncio.create_task(fleet.ask("m0", seconds=60))
        await asyncio.sleep(1)
        late = asyncio.create_task(fleet.ask("m2"))
        await asyncio.sleep(5)
        assert state_of(fleet, "m0").state == "draining"
        queued = asyncio.create_task(fleet.ask("m0"))
        await asyncio.sleep(1)
        assert state_of(fleet, "m0").num_waiting == 1
        late.cancel()
        await queued
        assert state_of(fleet, "m0").state == "ready"
        assert not busy.done()
        await busy

    play(fleet, scene())


def test_ten_models_where_two_fit_serve_thirty_two_clients_without_thrash() -> None:
    fleet = fleet_of(10)
    fleet.host_bytes = 0
    choose = random.Random(6)
    num_answers, waits = 0, []

    async def client() -> None:
        nonlocal num_answers
        for _ in range(12):
            began_at = now()
            await fleet.ask(f"m{choose.randrange(10)}", seconds=choose.uniform(0.2, 4.0))
            waits.append(now() - began_at)
            num_answers += 1

    async def scene() -> None:
        await asyncio.gather(*(client() for _ in range(32)))

    play(fleet, scene())
    num_loads = sum(model.num_loads for model in fleet.models.values())
    assert num_answers == 32 * 12
    # Every load serves those who queued for it: about 32 clients on 10 models.
    assert num_answers / num_loads > 2.5
    # Nobody waits for more than two rounds of all models.
    assert max(waits) < 2 * 10 * (5.0 + 4.0)


def test_a_killed_worker_costs_its_requests_one_error_each_and_the_next_gets_a_fresh_one() -> None:
    fleet = fleet_of(1)

    async def scene() -> None:
        asking = [asyncio.create_task(fleet.ask("m0", seconds=30)) for _ in range(3)]
        await asyncio.sleep(8)
        fleet.workers[0].kill()
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [WorkerDied] * 3
        await asyncio.sleep(0.5)
        assert list(fleet.supervisor.ledger) == []
        assert state_of(fleet, "m0").state == "failed"
        await fleet.ask("m0")

    play(fleet, scene())
    assert kinds(fleet) == ["load", "ready", "fail", "load", "ready", "unload"]


@pytest.mark.parametrize(
    ("asked", "seconds", "stays"),
    [(None, 59, True), (None, 61, False), (5.0, 4, True), (5.0, 6, False), (0.0, 1, False)],
)
def test_keep_alive_counts_from_the_last_request(asked: float | None, seconds: float, stays: bool) -> None:
    fleet = fleet_of(1, keep_alive=60.0)

    async def scene() -> None:
        await fleet.ask("m0", keep_alive=asked)
        await asyncio.sleep(seconds)
        assert ("m0" in names(fleet)) == stays

    play(fleet, scene())


def test_a_keep_alive_of_zero_is_for_once() -> None:
    fleet = fleet_of(1, keep_alive=60.0)

    async def scene() -> None:
        for _ in range(2):  # one that is not there, and one that is
            await fleet.load_model("m0", keep_alive=0.0)
            await asyncio.sleep(1)
            assert "m0" not in names(fleet)
            await fleet.load_model("m0")
            await asyncio.sleep(59)
            assert "m0" in names(fleet)

    play(fleet, scene())


def test_a_model_that_is_kept_for_ever_or_pinned_shows_no_end() -> None:
    fleet = fleet_of(2, keep_alive=60.0)

    async def scene() -> None:
        await fleet.ask("m0", keep_alive=math.inf)
        await fleet.load_model("m1", pin=True)
        assert [state_of(fleet, name).until for name in ("m0", "m1")] == [None, None]
        await asyncio.sleep(1000)
        assert names(fleet) == {"m0", "m1"}
        await fleet.supervisor.pin("m1", False)
        assert state_of(fleet, "m1").until is not None
        await asyncio.sleep(61)
        assert names(fleet) == {"m0"}

    play(fleet, scene())


def test_an_idle_daemon_has_nothing_to_do() -> None:
    fleet = fleet_of(1)

    async def scene() -> None:
        await fleet.ask("m0", keep_alive=math.inf)
        # The one task that is left waits for the worker to fail.
        await asyncio.sleep(2)
        began_at = now()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert ["_watch" in str(task) for task in others] == [True]
        assert now() == began_at

    play(fleet, scene())


def test_a_busy_model_borrows_kv_cache_and_gives_it_back() -> None:
    models = [
        FakeModel("chat", fixed_bytes=GIB, least_blocks=64, wanted_blocks=2500, most_blocks=4096),
        FakeModel("other", fixed_bytes=GIB, least_blocks=64, wanted_blocks=1000, most_blocks=4096),
    ]
    fleet = Fleet({model.name: model for model in models}, {"cuda:0": 6 * GIB}, Settings())

    async def scene() -> None:
        await fleet.load_model("chat")
        await fleet.load_model("other")
        before = state_of(fleet, "other").kv_bytes
        asking = [asyncio.create_task(fleet.ask("other", seconds=30, blocks=200)) for _ in range(10)]
        await asyncio.sleep(10)
        assert state_of(fleet, "other").kv_bytes > before
        assert state_of(fleet, "other").kv_tokens * BLOCK_BYTES // 16 == state_of(fleet, "other").kv_bytes
        fleet.check()
        await asyncio.gather(*asking)

    play(fleet, scene())
    assert "resize" in kinds(fleet, "chat")
    assert "resize" in kinds(fleet, "other")
    assert fleet.models["other"].num_loads == 1


def test_a_model_that_gave_cache_has_its_context_back_before_its_next_request_begins() -> None:
    models = [
        FakeModel("chat", fixed_bytes=GIB, least_blocks=64, wanted_blocks=3000),
        FakeModel("large", fixed_bytes=3 * GIB, least_blocks=64, wanted_blocks=64),
        FakeModel("roomy", fixed_bytes=GIB, least_blocks=64, wanted_blocks=3000),
    ]
    fleet = Fleet({model.name: model for model in models}, {"cuda:0": 6 * GIB}, Settings())

    async def scene() -> None:
        await fleet.ask("chat")
        await fleet.ask("large")
        assert state_of(fleet, "chat").kv_bytes < 2000 * BLOCK_BYTES, "it gave what it did not use"
        await fleet.supervisor.stop("large")
        async with fleet.supervisor.serving("chat") as lease:
            assert lease.resident.stage.max_model_len == 3000 * 16
        await fleet.ask("roomy")
        async with fleet.supervisor.serving("roomy") as lease:
            assert lease.resident.stage.max_model_len == 3000 * 16, "an idle model gives what it does not use"

    play(fleet, scene())
    assert [model.num_loads for model in models] == [1, 1, 1]


def test_a_new_share_is_taken_from_what_others_do_not_use() -> None:
    fleet = fleet_of(2, devices={"cuda:0": 12 * GIB})

    async def scene() -> None:
        await fleet.load_model("m0", share=0.4)
        await fleet.load_model("m1")
        await fleet.supervisor.set_share("m1", 0.5)
        state = state_of(fleet, "m1")
        assert state.share == 0.5
        assert state.share_in_force == pytest.approx(0.5, abs=0.01)
        with pytest.raises(InsufficientMemory):
            await fleet.supervisor.set_share("m1", 0.6)
        assert state_of(fleet, "m1").share == 0.5
        await fleet.supervisor.set_share("m1", 0.25)
        assert state_of(fleet, "m1").share_in_force == pytest.approx(0.25, abs=0.01)

    play(fleet, scene())
    assert kinds(fleet, "m1").count("share") == 2


def test_the_text_side_goes_by_the_context_in_force() -> None:
    fleet = fleet_of(1, devices={"cuda:0": 12 * GIB})

    async def scene() -> None:
        lease = await fleet.ask("m0")
        await fleet.supervisor.set_share("m0", 0.2)
        assert lease.resident.facts.max_model_len == state_of(fleet, "m0").max_model_len
        assert lease.resident.stage.max_model_len == lease.resident.facts.max_model_len

    play(fleet, scene())


def test_sleep_waits_for_open_requests_and_a_request_wakes() -> None:
    fleet = fleet_of(1)

    async def scene() -> None:
        asking = asyncio.create_task(fleet.ask("m0", seconds=4))
        await asyncio.sleep(6)
        sleeping = asyncio.create_task(fleet.supervisor.sleep("m0"))
        await asyncio.sleep(1)
        assert state_of(fleet, "m0").state == "draining"
        await asyncio.gather(asking, sleeping)
        assert state_of(fleet, "m0").state == "asleep"
        assert state_of(fleet, "m0").kv_tokens == 0
        await fleet.supervisor.wake("m0")
        assert state_of(fleet, "m0").state == "ready"
        await fleet.supervisor.sleep("m0")
        await fleet.ask("m0")

    play(fleet, scene())
    assert fleet.models["m0"].num_loads == 1
    assert fleet.models["m0"].num_wakes == 2


def test_what_cannot_wake_is_loaded_anew() -> None:
    fleet = fleet_of(1)

    async def scene() -> None:
        await fleet.ask("m0")
        await fleet.supervisor.sleep("m0")
        asking = asyncio.create_task(fleet.ask("m0"))
        await asyncio.sleep(0.1)
        fleet.workers[0].kill()
        await asking

    play(fleet, scene())
    assert fleet.models["m0"].num_loads == 2


def test_a_worker_that_finds_the_plan_too_small_gets_more() -> None:
    fleet = fleet_of(1)
    fleet.models["m0"].real_fixed_bytes = 3 * GIB

    async def scene() -> None:
        await fleet.ask("m0")

    play(fleet, scene())
    assert fleet.models["m0"].num_loads == 2
    assert kinds(fleet).count("fail") == 0


def test_what_a_worker_really_held_counts_more_than_the_estimate() -> None:
    """A share that is enough for a model that is there is enough for it after its worker has died, too."""
    fleet = fleet_of(1)
    fleet.models["m0"].real_fixed_bytes = GIB

    async def scene() -> None:
        await fleet.ask("m0")
        await fleet.supervisor.set_share("m0", 0.25)
        fleet.workers[0].kill()
        await fleet.ask("m0")
        assert state_of(fleet, "m0").share_in_force == pytest.approx(0.25, abs=0.01)

    play(fleet, scene())


def test_stopping_ends_requests_and_those_in_line() -> None:
    fleet = fleet_of(2)

    async def scene() -> None:
        asking = asyncio.create_task(fleet.ask("m0", seconds=60))
        await asyncio.sleep(6)
        assert await fleet.supervisor.stop("m0")
        with pytest.raises(WorkerDied, match="was stopped"):
            await asking
        loading = asyncio.create_task(fleet.ask("m1"))
        await asyncio.sleep(1)
        assert await fleet.supervisor.stop("m1")
        with pytest.raises(WorkerDied, match="stopped"):
            await loading
        assert not await fleet.supervisor.stop("m1")
        assert list(fleet.supervisor.ledger) == []

    play(fleet, scene())


def test_a_load_that_is_stopped_before_it_began_leaves_nothing() -> None:
    fleet = fleet_of(1)

    async def scene() -> None:
        asking = asyncio.create_task(fleet.ask("m0"))
        while not list(fleet.supervisor.ledger):  # noqa: ASYNC110  # the very step in which the load begins
            await asyncio.sleep(0)
        assert await fleet.supervisor.stop("m0")
        with pytest.raises(WorkerDied):
            await asking
        assert list(fleet.supervisor.ledger) == []
        await fleet.ask("m0")

    play(fleet, scene())


@pytest.mark.parametrize("what", ["set_share", "pin", "sleep", "wake"])
def test_what_is_about_a_model_in_memory_says_so(what: str) -> None:
    fleet = fleet_of(1)
    arguments = {"set_share": (0.3,), "pin": (True,)}.get(what, ())

    async def scene() -> None:
        with pytest.raises(ModelNotLoaded, match="quire load m0"):
            await getattr(fleet.supervisor, what)("m0", *arguments)

    play(fleet, scene())


def test_the_settings_say_how_a_resident_is_kept() -> None:
    fleet = fleet_of(
        2,
        devices={"cuda:0": 8 * GIB, "cuda:1": 8 * GIB},
        residents=(ResidentSettings(model="m0", share=0.5, pin=True, keep_alive=7.0, device="cuda:1"),),
        gpu_memory_utilization=0.4,
    )

    async def scene() -> None:
        await fleet.ask("m0")
        await fleet.ask("m1")
        first, second = state_of(fleet, "m0"), state_of(fleet, "m1")
        assert (first.share, first.is_pinned, first.keep_alive_s, first.device) == (0.5, True, 7.0, "cuda:1")
        assert (second.share, second.is_pinned, second.device) == (0.4, False, "cuda:0")

    play(fleet, scene())


def test_loading_reports_progress_and_counts_as_no_request() -> None:
    fleet = fleet_of(1, max_queue=1)

    async def scene() -> None:
        asking = asyncio.create_task(fleet.ask("m0"))
        await asyncio.sleep(0)
        progress = await fleet.load_model("m0", pin=True)
        assert [one.stage for one in progress] == [
            "looking for room", "starting its worker", "loading weights"
        ]  # fmt: skip
        await asking
        assert await fleet.load_model("m0") == []

    play(fleet, scene())


def test_requests_in_line_learn_that_the_daemon_ends() -> None:
    fleet = fleet_of(1)
    fleet.models["m0"].load_s = 1000.0

    async def scene() -> None:
        asking = asyncio.create_task(fleet.ask("m0"))
        await asyncio.sleep(1)
        await fleet.supervisor.close()
        with pytest.raises(Exception, match="shutting down"):
            await asking

    play(fleet, scene())


def test_a_client_that_leaves_the_line_takes_nothing_along() -> None:
    fleet = fleet_of(1)

    async def scene() -> None:
        first, second = (asyncio.create_task(fleet.ask("m0")) for _ in range(2))
        await asyncio.sleep(1)
        first.cancel()
        await second
        assert fleet.models["m0"].num_loads == 1
        assert state_of(fleet, "m0").num_requests == 0
        worker = fleet.workers[0]
        assert isinstance(worker, FakeWorker)
        assert worker.num_open == 0

    play(fleet, scene())

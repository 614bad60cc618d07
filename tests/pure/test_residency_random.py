"""500 random operations on fake devices: the ledger adds up, and every request ends with an answer or an error."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from app.errors import AppError
from app.settings import Settings
from engine.api.errors import BrokenCheckpoint, EngineError
from store.errors import StoreError
from tests.fakes.fleet import GIB, FakeModel, Fleet
from tests.fakes.virtual_time import run

NUM_OPERATIONS = 500
NUM_MODELS = 7
LONGEST_WAIT_S = 3600.0


class Crowd:
    """People and programs that use a fleet without any plan, and remember what became of each of their wishes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        devices = self.random.choice([{"cuda:0": 7 * GIB}, {"cuda:0": 5 * GIB, "cuda:1": 9 * GIB}, {"cpu": 8 * GIB}])
        models = [self._model(f"m{number}") for number in range(NUM_MODELS)]
        settings = Settings(max_queue=24, keep_alive=self.random.choice([20.0, 300.0]))
        self.fleet = Fleet({model.name: model for model in models}, devices, settings)
        self.fleet.host_bytes = self.random.choice([0, 4 * GIB, 64 * GIB])
        self.tasks: list[asyncio.Task[None]] = []
        self.outcomes: Counter[str] = Counter()
        self.messages: set[str] = set()
        self.operations: list[Callable[[], None]] = [
            *[self.burst] * 12, self.load, self.share, self.pin, self.unpin, self.sleep, self.wake, self.stop,
            self.kill, self.take_memory, self.break_model,
        ]  # fmt: skip

    def _model(self, name: str) -> FakeModel:
        choose = self.random
        fixed = choose.randrange(GIB // 4, 3 * GIB)
        return FakeModel(
            name,
            fixed_bytes=fixed,
            least_blocks=choose.choice([0, 16, 128]),
            wanted_blocks=choose.randrange(128, 1024),
            most_blocks=choose.choice([0, 1024, 8192]) or 1024,
            load_s=choose.uniform(0.1, 20.0),
            wake_s=choose.uniform(0.05, 2.0),
            real_fixed_bytes=choose.choice([None, None, None, int(fixed * 1.4)]),
        )

    @property
    def name(self) -> str:
        return f"m{self.random.randrange(NUM_MODELS)}"

    def start(self, what: Callable[[], Awaitable[object]]) -> asyncio.Task[None]:
        """Begin an operation whose outcome is counted: anything but success or an error for people is a mistake."""

        async def do() -> None:
            try:
                await what()
            except asyncio.CancelledError:
                self.outcomes["left"] += 1
            except (EngineError, AppError, StoreError) as error:
                self.outcomes[error.code] += 1
                self.messages.add(error.message)
            else:
                self.outcomes["served"] += 1

        task = asyncio.create_task(do())
        self.tasks.append(task)
        return task

    def burst(self) -> None:
        name, loop = self.name, asyncio.get_running_loop()
        for _ in range(self.random.randrange(1, 9)):
            seconds, blocks = self.random.expovariate(0.3), self.random.choice([1, 8, 64, 400])
            keep_alive = self.random.choice([None, None, None, 0.0, 5.0, float("inf")])
            task = self.start(
                lambda seconds=seconds, blocks=blocks, keep_alive=keep_alive: self.fleet.ask(
                    name, seconds=seconds, blocks=blocks, keep_alive=keep_alive
                )
            )
            if self.random.random() < 0.15:
                loop.call_later(self.random.expovariate(0.3), task.cancel)

    def load(self) -> None:
        wishes = {
            "share": self.random.choice([None, None, 0.3, 0.6]),
            "pin": self.random.choice([None, True, False]),
            "keep_alive": self.random.choice([None, 1.0, 60.0]),
        }
        task = self.start(lambda name=self.name: self.fleet.load_model(name, **wishes))
        if self.random.random() < 0.2:
            asyncio.get_running_loop().call_later(self.random.expovariate(0.3), task.cancel)

    def share(self) -> None:
        share = self.random.uniform(0.05, 0.9)
        self.start(lambda name=self.name: self.fleet.supervisor.set_share(name, share))

    def pin(self) -> None:
        self.start(lambda name=self.name: self.fleet.supervisor.pin(name, True))

    def unpin(self) -> None:
        for name in self.fleet.models:
            self.start(lambda name=name: self.fleet.supervisor.pin(name, False))

    def sleep(self) -> None:
        self.start(lambda name=self.name: self.fleet.supervisor.sleep(name))

    def wake(self) -> None:
        self.start(lambda name=self.name: self.fleet.supervisor.wake(name))

    def stop(self) -> None:
        self.start(lambda name=self.name: self.fleet.supervisor.stop(name))

    def kill(self) -> None:
        if alive := self.fleet.alive():
            self.random.choice(alive).kill()

    def take_memory(self) -> None:
        device, total = self.random.choice(sorted(self.fleet.devices.items()))
        self.fleet.others_bytes[device] = self.random.choice([0, 0, 0, total // 4, total // 2])

    def break_model(self) -> None:
        model = self.fleet.models[self.name]
        is_broken = model.load_error is None and self.random.random() < 0.5
        model.load_error = BrokenCheckpoint("It lacks tensors; pull it again.") if is_broken else None

    async def use(self) -> None:
        for _ in range(NUM_OPERATIONS):
            self.random.choice(self.operations)()
            await asyncio.sleep(self.random.choice([0.0, 0.0, 0.01, 0.3, 1.0, 5.0]))
            self.fleet.check()
        self.unpin()
        done, hanging = await asyncio.wait(self.tasks, timeout=LONGEST_WAIT_S)
        assert not hanging
        for task in done:
            task.result()
        self.fleet.check()
        await self.fleet.supervisor.close()


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_keep_every_promise(seed: int) -> None:
    async def play() -> Crowd:
        crowd = Crowd(seed)
        await crowd.use()
        return crowd

    crowd: Crowd = run(play())

    assert list(crowd.fleet.supervisor.ledger) == []
    assert crowd.fleet.alive() == []
    assert sum(crowd.outcomes.values()) == len(crowd.tasks)
    assert crowd.outcomes["served"] > 200, crowd.outcomes
    assert [message for message in crowd.messages if not message.endswith(".")] == []

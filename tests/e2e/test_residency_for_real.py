"""50 operations on real workers with tiny random models: loads, requests, resizes, sleep, kills; the ledger adds up."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from app.errors import AppError
from app.metrics import Metrics
from app.residency.arithmetic.memory import DeviceMemory
from app.residency.arithmetic.tenants import DeviceShare
from app.residency.need_reader import NeedReader
from app.residency.room import Gauges
from app.residency.supervisor import Supervisor
from app.residency.workers.model_loader import ModelLoader
from app.server import WORKER_COMMAND
from app.settings import Settings
from app.usage_recorder import UsageRecorder
from engine.api.errors import EngineError
from engine.api.request import GenerateRequest
from engine.api.sampling import SamplingParams
from store.database import DatabaseThread
from store.known_facts import KnownFacts
from store.models import ModelStore
from store.paths import DataRoot
from tests.fakes.checkpoints import write_hf_checkpoint, write_tokenizer

NUM_OPERATIONS = 50
MIB = 2**20
MOST_S = 120.0


class Player:
    """Everything of the daemon but HTTP, on a machine that seems to have `memory_bytes`."""

    def __init__(self, directory: Path, models: Sequence[Path]) -> None:
        self.names = [str(model) for model in models]
        self.memory_bytes = 2**40
        data_root = DataRoot.open(directory / "data")
        self.database = DatabaseThread(directory / "quire.db")
        settings = Settings(device="cpu", max_model_len=512)
        metrics = Metrics()
        loader = ModelLoader(
            settings,
            data_root,
            directory,
            metrics,
            UsageRecorder(self.database),
            worker_command=WORKER_COMMAND,
        )
        self.supervisor = Supervisor(
            settings,
            loader,
            metrics,
            find_model=ModelStore(data_root).find,
            need_of=NeedReader(settings, KnownFacts().read, self.read_traffic).need_of,
            gauges=Gauges(lambda _: (DeviceMemory("cpu", self.memory_bytes, 0),), lambda _: 0),
        )
        self.tasks: list[asyncio.Task[str]] = []

    async def read_traffic(self, _model: str) -> None:
        return None

    async def ask(self, name: str, max_tokens: int) -> str:
        """One request; returns its text, or the code of the error with which it ended."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = GenerateRequest(request_id="r", sampling=sampling, text="the quick brown fox")
        text = ""
        try:
            async with self.supervisor.serving(name) as lease:
                assert lease.resident.generator is not None
                async for deltas in lease.resident.generator.generate([request]):
                    text += "".join(delta.text for delta in deltas)
        except (EngineError, AppError) as error:
            return error.code
        return text

    async def change(self, what: str, name: str) -> str:
        """Something that people do with a model; returns the code of the error, if there is one."""
        try:
            if what == "share":
                await self.supervisor.set_share(name, self.some_share(name))
            elif what == "sleep":
                await self.supervisor.sleep(name)
            elif what == "wake":
                await self.supervisor.wake(name)
            else:
                await self.supervisor.pin(name, what == "pin")
        except (EngineError, AppError) as error:
            return error.code
        return ""

    def some_share(self, name: str) -> float:
        """What it takes besides its KV cache, and some megabytes for that."""
        states = [state for state in self.supervisor.states() if name in state.names]
        # 0 while its worker is not there: a share of a few megabytes alone would be refused to the requests.
        fixed_bytes = (states[0].fixed_bytes if states else 0) or 200 * MIB
        return (fixed_bytes + random.Random(len(self.tasks)).randrange(1, 12) * MIB) / self.memory_bytes

    def kill(self) -> None:
        """SIGKILL for a worker of ours."""
        pids = [resident.worker.pid for resident in self.supervisor.residents]
        if pids and pids[0] is not None:
            os.kill(pids[0], signal.SIGKILL)

    def check(self) -> None:
        self.supervisor.ledger.check([DeviceShare("cpu", self.memory_bytes, 0, 0.92)])
        for state in self.supervisor.states():
            assert state.kv_bytes + state.fixed_bytes == state.size_bytes or state.state in ("loading", "draining")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = []
    for number, family in enumerate(("llama", "qwen2", "qwen3")):
        paths.append(tmp_path_factory.mktemp(family))
        write_hf_checkpoint(paths[-1], family, seed=number)
        write_tokenizer(paths[-1])
    return paths


async def test_fifty_operations_on_real_workers(tmp_path: Path, models: list[Path]) -> None:
    choose = random.Random(3)
    player = Player(tmp_path, models)
    alone = [await player.ask(player.names[0], 24)]
    # Two of the models fit.
    player.memory_bytes = int(2.6 * player.supervisor.states()[0].size_bytes / 0.92)
    alone += [await player.ask(name, 24) for name in player.names[1:]]
    assert len(set(alone)) == 3
    asked: list[tuple[str, asyncio.Task[str]]] = []
    operations = ["ask"] * 8 + ["share", "share", "sleep", "wake", "pin", "unpin"]
    for number in range(NUM_OPERATIONS):
        what = "kill" if number in (15, 35) else choose.choice(operations)
        # Loading takes seconds: mostly the same two models are used.
        name = player.names[choose.choice([0, 0, 0, 1, 1, 1, 2]) if number % 10 == 0 else number % 2]
        if what == "kill":
            player.kill()
        elif what == "ask":
            for _ in range(choose.randrange(1, 6)):
                asked.append((name, asyncio.create_task(player.ask(name, 24))))
        else:
            player.tasks.append(asyncio.create_task(player.change(what, name)))
        await asyncio.sleep(choose.choice([0.0, 0.02, 0.1]))
        player.check()
    for name in player.names:
        player.tasks.append(asyncio.create_task(player.change("unpin", name)))

    tasks = [*player.tasks, *(task for _, task in asked)]
    _, hanging = await asyncio.wait(tasks, timeout=MOST_S)
    assert not hanging, player.supervisor.states()
    answers = dict(zip(player.names, alone, strict=True))
    outcomes = [(name, task.result()) for name, task in asked]
    for name, outcome in outcomes:
        assert outcome in (answers[name], "worker_died"), name
    assert sum(outcome != "worker_died" for _, outcome in outcomes) > len(outcomes) // 2
    name = player.names[0]
    assert await player.ask(name, 24) == answers[name]
    assert await player.change("share", name) == ""
    assert await player.change("sleep", name) == ""
    assert await player.ask(name, 24) == answers[name]
    player.kill()
    await asyncio.gather(*(player.ask(name, 24) for name in player.names))
    kinds = {event.kind for event in player.supervisor.events.after()}
    assert {"load", "ready", "resize", "share", "sleep", "wake", "evict", "fail"} <= kinds
    player.check()
    pids = [resident.worker.pid for resident in player.supervisor.residents]

    await player.supervisor.close()

    player.database.close()
    assert list(player.supervisor.ledger) == []
    assert not any(psutil.pid_exists(pid) for pid in pids if pid is not None)

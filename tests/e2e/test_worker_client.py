"""The daemon's end of the socket, with a worker process that does not do what it should."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import zmq.asyncio

from app.residency.workers import worker_client
from app.residency.workers.worker_client import WorkerClient
from engine.api.config import EngineConfig
from engine.api.errors import WorkerDied
from engine.api.request import Prompt
from engine.api.sampling import SamplingParams
from tests.fakes.tiny_model import write_tiny_model

FAKE_WORKER = Path(__file__).parents[1] / "fakes" / "worker.py"


@asynccontextmanager
async def started(tmp_path: Path, **behaviour: object) -> AsyncIterator[WorkerClient]:
    context = zmq.asyncio.Context()
    worker = WorkerClient(context, tmp_path)
    model = write_tiny_model(tmp_path / "model", behaviour=behaviour)
    try:
        await worker.start(
            [sys.executable, str(FAKE_WORKER)],
            {"PYTHONPATH": str(FAKE_WORKER.parents[2])},
            tmp_path / "log",
            EngineConfig(model=str(model), device="cpu", memory_budget_bytes=10**6),
            timeout_s=30.0,
            on_progress=lambda _: None,
        )
        yield worker
    finally:
        await worker.close(0.2)
        context.destroy(linger=0)


def a_prompt(worker: WorkerClient) -> Prompt:
    return Prompt(worker.next_sequence_id(), (1, 2, 3), 10, SamplingParams())


async def test_a_worker_that_says_nothing_for_long_counts_as_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client, "MOST_SILENCE_S", 0.2)
    async with started(tmp_path, is_stalled=True) as worker:
        pid = worker.pid
        mailbox = worker.submit([a_prompt(worker)])

        outputs = await mailbox.take()

        assert [output.finish_reason for output in outputs] == ["error"]
        assert "said nothing" in (outputs[0].error_message or "")
        assert worker.failed.is_set()
        with pytest.raises(WorkerDied, match="said nothing"):
            worker.submit([a_prompt(worker)])
    assert pid is not None
    assert not psutil.pid_exists(pid)


async def test_an_idle_worker_may_be_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "MOST_SILENCE_S", 0.2)
    async with started(tmp_path) as worker:
        for _ in range(2):
            mailbox = worker.submit([a_prompt(worker)])
            while not any(output.finish_reason for output in await mailbox.take()):
                pass
            await asyncio.sleep(0.5)
        assert worker.failure is None


async def test_a_worker_that_does_not_answer_a_call_counts_as_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client, "CALL_TIMEOUT_S", 0.2)
    async with started(tmp_path) as worker:
        assert worker.pid is not None
        psutil.Process(worker.pid).suspend()
        with pytest.raises(WorkerDied, match="did not answer"):
            await worker.resize_cache(10)
        assert worker.failed.is_set()

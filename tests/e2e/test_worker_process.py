"""A real worker process over a real socket: loading, serving, aborting, and leaving."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import zmq

from engine.api import wire
from engine.api.config import EngineConfig
from engine.api.output import StepOutput
from engine.api.request import Pooling, Prompt
from engine.api.sampling import SamplingParams
from tests.fakes.checkpoints import (
    write_encoder_checkpoint,
    write_gguf_checkpoint,
    write_hf_checkpoint,
    write_tokenizer,
)

GREEDY = SamplingParams(temperature=0.0)


class WorkerPeer:
    """The daemon's end of the socket, in its simplest form."""

    def __init__(self, socket: zmq.Socket[bytes], process: subprocess.Popen[bytes]) -> None:
        self._socket = socket
        self.process = process

    def send(self, frame: wire.ToWorker) -> None:
        self._socket.send(wire.encode(frame))

    def receive(self) -> wire.FromWorker:
        assert self._socket.poll(60_000), "the worker sent nothing for a minute"
        return wire.decode_from_worker(self._socket.recv())

    def start(self, config: EngineConfig, wire_version: int = wire.WIRE_VERSION) -> wire.FromWorker:
        """Send `Start` and return the answer after all progress."""
        self.send(wire.Start(wire_version, config))
        while isinstance(frame := self.receive(), wire.Progress):
            assert 0 <= frame.done <= frame.total
        return frame

    def steps_until_finished(self, sequence_ids: set[int]) -> tuple[dict[int, list[StepOutput]], wire.EngineStats]:
        """Outputs of each sequence until all have ended, and the last stats."""
        outputs: dict[int, list[StepOutput]] = {sequence_id: [] for sequence_id in sequence_ids}
        stats = wire.EngineStats()
        while not all(steps and steps[-1].finish_reason for steps in outputs.values()):
            frame = self.receive()
            assert isinstance(frame, wire.Steps)
            stats = frame.stats
            for output in frame.outputs:
                outputs[output.sequence_id].append(output)
        return outputs, stats


@contextmanager
def worker_process(directory: Path) -> Iterator[WorkerPeer]:
    endpoint = f"ipc://{directory}/w"
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.bind(endpoint)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.worker", "--connect", endpoint], stdin=subprocess.PIPE
    )
    try:
        yield WorkerPeer(socket, process)
    finally:
        process.kill()
        process.communicate()
        socket.close(linger=0)
        context.term()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_hf_checkpoint(path, "llama")
    write_tokenizer(path)
    return path


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerPeer]:
    with worker_process(tmp_path) as peer:
        yield peer


def config_for(checkpoint: Path) -> EngineConfig:
    return EngineConfig(model=str(checkpoint), device="cpu", max_model_len=128, max_num_seqs=4)


def test_serves_aborts_and_shuts_down(worker: WorkerPeer, checkpoint: Path):
    ready = worker.start(config_for(checkpoint))
    assert isinstance(ready, wire.Ready)
    assert ready.facts.max_model_len == 128

    prompts = tuple(Prompt(sequence_id, (5, 6, 7, sequence_id), 10, GREEDY) for sequence_id in (1, 2, 3, 4, 5, 6))
    worker.send(wire.Submit(prompts))
    outputs, stats = worker.steps_until_finished({1, 2, 3, 4, 5, 6})
    for steps in outputs.values():
        assert sum(len(step.token_ids) for step in steps) == 10
        assert [step.finish_reason for step in steps if step.finish_reason] == ["length"]
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.generation_tokens_total == 60

    worker.send(wire.Submit((Prompt(7, (1, 2, 3), 120, GREEDY),)))
    assert isinstance(first := worker.receive(), wire.Steps)
    assert first.outputs[0].sequence_id == 7
    worker.send(wire.Abort((7, 999)))
    outputs, stats = worker.steps_until_finished({7})
    assert outputs[7][-1].finish_reason == "abort"
    assert stats.num_free_blocks == stats.num_blocks

    worker.send(wire.Shutdown())
    assert worker.process.wait(10) == 0


def test_its_memory_changes_while_it_serves_and_it_sleeps_when_idle(worker: WorkerPeer, checkpoint: Path):
    ready = worker.start(config_for(checkpoint))
    assert isinstance(ready, wire.Ready)
    assert ready.facts.fixed_bytes > ready.facts.weight_bytes
    assert ready.facts.max_kv_blocks == 32

    def call(frame: wire.ToWorker) -> wire.Memory | wire.Refused:
        worker.send(frame)
        while isinstance(answer := worker.receive(), wire.Steps):
            finished.update({output.sequence_id: output.finish_reason for output in answer.outputs})
        assert isinstance(answer, wire.Memory | wire.Refused)
        return answer

    finished: dict[int, str | None] = {}
    worker.send(wire.Submit(tuple(Prompt(sequence_id, (5, 6, 7), 100, GREEDY) for sequence_id in (1, 2, 3))))
    resized = call(wire.ResizeCache(41, 9))
    assert isinstance(resized, wire.Memory)
    assert (resized.call_id, resized.memory.num_kv_blocks, resized.memory.max_model_len) == (41, 9, 128)
    assert call(wire.Sleep(42)) == wire.Refused(
        42, "engine_busy", "The model cannot sleep while it has open sequences; wait until they end."
    )
    while set(finished.values()) != {"length"} or len(finished) < 3:
        frame = worker.receive()
        assert isinstance(frame, wire.Steps)
        finished.update({output.sequence_id: output.finish_reason for output in frame.outputs})

    asleep = call(wire.Sleep(43))
    assert isinstance(asleep, wire.Memory)
    assert asleep.memory.is_asleep
    worker.send(wire.Submit((Prompt(4, (5, 6, 7), 2, GREEDY),)))
    outputs, _ = worker.steps_until_finished({4})
    assert outputs[4][-1].error_message == "The model is asleep; wake it first."
    awake = call(wire.Wake(44, 20))
    assert isinstance(awake, wire.Memory)
    assert (awake.memory.is_asleep, awake.memory.num_kv_blocks) == (False, 20)
    worker.send(wire.Submit((Prompt(5, (5, 6, 7), 2, GREEDY),)))
    outputs, stats = worker.steps_until_finished({5})
    assert (outputs[5][-1].finish_reason, stats.num_blocks) == ("length", 20)


def test_calls_between_everything_else_have_one_answer_each_in_order(worker: WorkerPeer, checkpoint: Path):
    assert isinstance(worker.start(config_for(checkpoint)), wire.Ready)

    def prompts(*sequence_ids: int) -> wire.Submit:
        return wire.Submit(tuple(Prompt(one, (5, 6, 7, one), 100, GREEDY) for one in sequence_ids))

    for frame in (
        prompts(1, 2, 3, 4, 5, 6),
        wire.ResizeCache(1, 9),
        wire.Abort((1, 2, 99)),
        wire.Sleep(2),
        wire.ResizeCache(3, 20),
        wire.ResizeCache(4, 1),
        wire.Abort((3, 4, 5, 6)),
        wire.Sleep(5),
        prompts(7),
        wire.ResizeCache(6, 5),
        wire.Wake(7, 12),
        prompts(8, 9),
        wire.Wake(8, 30),
    ):
        worker.send(frame)
    calls: list[wire.Memory | wire.Refused] = []
    ends: dict[int, str | None] = {}
    while len(calls) < 8 or len(ends) < 9:
        frame = worker.receive()
        if not isinstance(frame, wire.Steps):
            assert isinstance(frame, wire.Memory | wire.Refused)
            calls.append(frame)
            continue
        for output in frame.outputs:
            assert output.sequence_id not in ends, "nothing comes after a terminal output"
            if output.finish_reason is not None:
                ends[output.sequence_id] = output.finish_reason
    assert [call.call_id for call in calls] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert isinstance(calls[4], wire.Memory) and calls[4].memory.is_asleep
    assert isinstance(calls[5], wire.Refused) and calls[5].code == "engine_asleep"
    assert isinstance(calls[7], wire.Memory) and calls[7].memory.num_kv_blocks == 30
    assert (ends[7], ends[8], ends[9]) == ("error", "length", "length")


def test_an_encoder_pools_sleeps_and_wakes(worker: WorkerPeer, tmp_path: Path):
    write_encoder_checkpoint(tmp_path, "bert")
    ready = worker.start(config_for(tmp_path))
    assert isinstance(ready, wire.Ready)
    assert (ready.facts.task, ready.facts.embedding_length, ready.facts.num_kv_blocks) == ("embed", 64, 0)

    def texts(*sequence_ids: int, kind: Literal["embed", "score"] = "embed") -> wire.Submit:
        pooling = Pooling(kind)
        return wire.Submit(tuple(Prompt(one, (4 + one % 3, 5, 6), 0, GREEDY, pooling=pooling) for one in sequence_ids))

    worker.send(texts(*range(1, 10)))
    outputs, stats = worker.steps_until_finished(set(range(1, 10)))
    assert {len(steps) for steps in outputs.values()} == {1}
    assert {len(steps[0].pooled) for steps in outputs.values()} == {4 * 64}
    assert outputs[1][0].pooled != outputs[2][0].pooled
    assert (stats.num_running, stats.num_waiting, stats.prompt_tokens_total) == (0, 0, 27)

    worker.send(texts(10, kind="score"))
    outputs_of_refused, _ = worker.steps_until_finished({10})
    assert "makes vectors" in str(outputs_of_refused[10][0].error_message)

    worker.send(wire.Sleep(1))
    assert isinstance(asleep := worker.receive(), wire.Memory) and asleep.memory.is_asleep
    worker.send(wire.Wake(2, 0))
    assert isinstance(awake := worker.receive(), wire.Memory)
    assert (awake.memory.is_asleep, awake.memory.fixed_bytes) == (False, ready.facts.fixed_bytes)
    worker.send(texts(12))
    again, _ = worker.steps_until_finished({12})
    vectors = (np.frombuffer(one, dtype="<f4") for one in (again[12][0].pooled, outputs[3][0].pooled))
    np.testing.assert_allclose(*vectors, atol=1e-6)


def test_a_prompt_that_cannot_run_is_refused_alone(worker: WorkerPeer, checkpoint: Path):
    assert isinstance(worker.start(config_for(checkpoint)), wire.Ready)
    worker.send(wire.Submit((Prompt(1, tuple(range(3, 203)), 5, GREEDY), Prompt(2, (4, 5), 3, GREEDY))))
    outputs, _ = worker.steps_until_finished({1, 2})
    assert outputs[1][-1].finish_reason == "error"
    assert "201 tokens" in (outputs[1][-1].error_message or "")
    assert outputs[2][-1].finish_reason == "length"


def test_leaves_when_its_parent_is_gone(worker: WorkerPeer, checkpoint: Path):
    assert isinstance(worker.start(config_for(checkpoint)), wire.Ready)
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.process.wait(10) == 0


def test_a_truncated_gguf_is_one_clear_sentence(worker: WorkerPeer, checkpoint: Path, tmp_path: Path):
    gguf = tmp_path / "broken.gguf"
    write_gguf_checkpoint(gguf, checkpoint, "F32")
    gguf.write_bytes(gguf.read_bytes()[: gguf.stat().st_size // 2])
    answer = worker.start(EngineConfig(model=str(gguf), device="cpu"))
    assert isinstance(answer, wire.Fatal)
    assert answer.code == "broken_checkpoint"
    assert "broken.gguf" in answer.message
    assert worker.process.wait(10) == 1


def test_another_wire_version_is_refused(worker: WorkerPeer, checkpoint: Path):
    answer = worker.start(config_for(checkpoint), wire_version=wire.WIRE_VERSION + 1)
    assert isinstance(answer, wire.Fatal)
    assert "restart the daemon" in answer.message

"""The worker's answers to calls about its memory, with an engine that is told what to answer."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import zmq

from engine import worker as worker_module
from engine.api import wire
from engine.api.config import EngineConfig
from engine.api.errors import InsufficientMemory
from engine.api.output import StepOutput
from engine.api.request import Prompt
from engine.worker import Worker

Sockets = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]

AWAKE = wire.WorkerMemory(num_kv_blocks=9, max_model_len=144, fixed_bytes=100)
ASLEEP = wire.WorkerMemory(num_kv_blocks=0, max_model_len=144, fixed_bytes=5, host_bytes=60, is_asleep=True)
FACTS = wire.WorkerFacts(
    architecture="fake",
    dtype="float32",
    device="cpu",
    max_model_len=144,
    vocab_size=300,
    num_parameters=1,
    weight_bytes=60,
    kv_bytes_per_token=1,
    num_kv_blocks=9,
    block_size=16,
    max_num_seqs=1,
)


class ObedientEngine:
    """Without work of its own; `failure` is raised by what changes its memory."""

    facts = FACTS
    has_work = False
    has_spare_work = False

    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure

    def submit(self, prompt: Prompt) -> None:
        raise InsufficientMemory("There is no room for a prompt; send none.")

    def abort(self, sequence_id: int) -> StepOutput | None:
        return None

    def stats(self) -> wire.EngineStats:
        return wire.EngineStats()

    def resize_cache(self, num_blocks: int) -> wire.WorkerMemory:
        return self._answer(msgspec.structs.replace(AWAKE, num_kv_blocks=num_blocks))

    def sleep(self) -> wire.WorkerMemory:
        return self._answer(ASLEEP)

    def wake(self, num_blocks: int) -> wire.WorkerMemory:
        return self.resize_cache(num_blocks)

    def _answer(self, memory: wire.WorkerMemory) -> wire.WorkerMemory:
        if self._failure is not None:
            raise self._failure
        return memory


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """The daemon's end and the worker's."""
    context = zmq.Context()
    daemon, worker = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    daemon.bind("inproc://worker")
    worker.connect("inproc://worker")
    yield daemon, worker
    for socket in (daemon, worker):
        socket.close(linger=0)
    context.term()


CALLS = (wire.ResizeCache(1, 4), wire.Sleep(2), wire.Wake(3, 7))


def serve(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None
) -> tuple[int, list[wire.FromWorker]]:
    """The exit code and all answers of a worker that finds `CALLS` and others waiting."""
    daemon, socket = sockets
    monkeypatch.setattr(worker_module, "open_engine", lambda config, on_progress: ObedientEngine(failure))
    frames = [wire.Start(wire.WIRE_VERSION, EngineConfig(model="x")), *CALLS, wire.Abort((7,)), wire.Shutdown()]
    for frame in frames:
        daemon.send(wire.encode(frame))
    code = Worker(socket).run()
    answers = []
    while daemon.poll(0):
        answers.append(wire.decode_from_worker(daemon.recv()))
    return code, answers


def test_every_call_has_one_answer_in_order(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    code, answers = serve(sockets, monkeypatch)
    assert code == 0
    assert answers == [
        wire.Ready(FACTS),
        wire.Memory(1, msgspec.structs.replace(AWAKE, num_kv_blocks=4)),
        wire.Memory(2, ASLEEP),
        wire.Memory(3, msgspec.structs.replace(AWAKE, num_kv_blocks=7)),
    ]


def test_what_cannot_be_done_is_refused_with_its_reason(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    code, answers = serve(sockets, monkeypatch, InsufficientMemory("There is no RAM; stop others."))
    refused = [wire.Refused(number, "insufficient_memory", "There is no RAM; stop others.") for number in (1, 2, 3)]
    assert (code, answers) == (0, [wire.Ready(FACTS), *refused])


def test_an_engine_of_which_nothing_is_known_ends_the_worker(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    code, answers = serve(sockets, monkeypatch, RuntimeError("the device is gone"))
    assert code == 1
    ready, fatal = answers
    assert ready == wire.Ready(FACTS)
    assert isinstance(fatal, wire.Fatal)
    assert "the device is gone" in fatal.message

"""A worker process without a model: the real wire protocol, and an "engine" that repeats its prompt.

Run like the real one (`python tests/fakes/worker.py --connect ENDPOINT`).  Each sequence
yields the tokens of its prompt in order, one per step, and then its first stop token, or the
prompt again where it has none.  A prompt that is to be pooled becomes `pooled_values`, so many each
step as the budget of a step allows.  `fake_worker.json` in the model directory changes that; see
`Behaviour`.
"""

from __future__ import annotations

import argparse
import math
import os
import threading
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from engine.api import wire
from engine.api.output import StepOutput, TokenLogprobs
from engine.api.request import Prompt
from engine.pooling.config import read_pooling

BLOCK_SIZE = 16
NUM_BLOCKS = 64
MOST_BLOCKS = 128
FIXED_BYTES = 4000
MAX_MODEL_LEN = 512
VOCAB_SIZE = 257
EMBEDDING_LENGTH = 8
POOLED_TOKENS_A_STEP = 256


class Behaviour(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`load_error` is (code, message); `fixed_bytes` is what it holds besides its KV cache of `bytes_per_token`.

    With a budget below `fixed_bytes` the worker refuses with insufficient_memory;
    after `die_after_steps` it exits as if it had crashed.
    """

    load_delay_s: float = 0.0
    load_error: tuple[str, str] | None = None
    die_while_loading: bool = False
    fixed_bytes: int = FIXED_BYTES
    step_delay_s: float = 0.0
    is_stalled: bool = False
    die_after_steps: int | None = None
    bytes_per_token: int = 1
    ignore_shutdown: bool = False


@dataclass
class FakeSequence:
    prompt: Prompt
    num_generated: int = 0

    @property
    def num_blocks(self) -> int:
        return math.ceil((len(self.prompt.token_ids) + self.num_generated) / BLOCK_SIZE)

    def step(self) -> StepOutput:
        prompt = self.prompt
        if prompt.pooling is not None:
            return StepOutput(
                prompt.sequence_id, finish_reason="stop", pooled=array("f", pooled_values(prompt)).tobytes()
            )
        is_echo_over = self.num_generated >= len(prompt.token_ids) and prompt.stop_token_ids
        may_stop = self.num_generated >= prompt.sampling.min_tokens
        if is_echo_over and may_stop:
            token_id = prompt.stop_token_ids[0]
            self.num_generated += 1
            return self._output(token_id, "stop", token_id)
        token_id = prompt.token_ids[self.num_generated % len(prompt.token_ids)]
        self.num_generated += 1
        is_full = self.num_generated >= prompt.max_tokens
        return self._output(token_id, "length" if is_full else None, None)

    def _output(self, token_id: int, reason: str | None, stop_token_id: int | None) -> StepOutput:
        wanted = self.prompt.sampling.logprobs
        logprobs = ()
        if wanted is not None:
            top = tuple((token_id + i) % VOCAB_SIZE for i in range(wanted))
            logprobs = (TokenLogprobs(-0.25, top, tuple(-0.25 * (i + 1) for i in range(wanted))),)
        return StepOutput(
            self.prompt.sequence_id,
            (token_id,),
            reason,  # type: ignore[arg-type]
            stop_token_id,
            num_cached_tokens=BLOCK_SIZE if len(self.prompt.token_ids) > BLOCK_SIZE else 0,
            logprobs=logprobs,
        )


def pooled_values(prompt: Prompt) -> list[float]:
    """A vector of length 1 with as much at place i as there are ids of remainder i; or how many ids a pair shares."""
    pooling, token_ids = prompt.pooling, prompt.token_ids
    assert pooling is not None
    if pooling.kind == "embed":
        counts = [
            sum(token_id % EMBEDDING_LENGTH == place for token_id in token_ids) for place in range(EMBEDDING_LENGTH)
        ]
        counts = counts[: pooling.dimensions]
        return [count / (math.hypot(*counts) or 1.0) for count in counts]
    if pooling.kind == "choice":
        return [1 / len(token_ids)]
    first, second = token_ids[: pooling.second_start], token_ids[pooling.second_start :]
    return [float(len(set(first) & set(second)) - 2)]


@dataclass
class FakeEngine:
    behaviour: Behaviour
    sequences: dict[int, FakeSequence] = field(default_factory=dict)
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated: int = 0
    num_blocks: int = NUM_BLOCKS
    is_asleep: bool = False

    @property
    def num_used_blocks(self) -> int:
        return sum(sequence.num_blocks for sequence in self.sequences.values())

    def memory(self) -> wire.WorkerMemory:
        return wire.WorkerMemory(
            num_kv_blocks=0 if self.is_asleep else self.num_blocks,
            max_model_len=MAX_MODEL_LEN,
            fixed_bytes=0 if self.is_asleep else self.behaviour.fixed_bytes,
            host_bytes=self.behaviour.fixed_bytes if self.is_asleep else 0,
            is_asleep=self.is_asleep,
        )

    def change(self, frame: wire.ResizeCache | wire.Sleep | wire.Wake) -> wire.Memory | wire.Refused:
        """Do what a call about memory asks."""
        if isinstance(frame, wire.Sleep):
            if self.sequences:
                return wire.Refused(frame.call_id, "engine_busy", "The model has open sequences.")
            self.is_asleep = True
        else:
            self.is_asleep = False
            self.num_blocks = max(1, self.num_used_blocks, min(frame.num_blocks, MOST_BLOCKS))
        return wire.Memory(frame.call_id, self.memory())

    def submit(self, prompt: Prompt) -> None:
        self.sequences[prompt.sequence_id] = FakeSequence(prompt)
        self.num_prompt_tokens += len(prompt.token_ids)

    def step(self) -> list[StepOutput]:
        if self.behaviour.die_after_steps is not None and self.num_steps >= self.behaviour.die_after_steps:
            os._exit(7)
        self.num_steps += 1
        time.sleep(self.behaviour.step_delay_s)
        outputs = [sequence.step() for sequence in self._scheduled()]
        self.num_generated += len(outputs)
        for output in outputs:
            if output.finish_reason is not None:
                del self.sequences[output.sequence_id]
        return outputs

    def _scheduled(self) -> list[FakeSequence]:
        """All that generate, and of those to be pooled the first ones within the budget."""
        scheduled, room = [], POOLED_TOKENS_A_STEP
        for sequence in self.sequences.values():
            if sequence.prompt.pooling is not None:
                room -= len(sequence.prompt.token_ids)
                if room < 0:
                    continue
            scheduled.append(sequence)
        return scheduled

    def stats(self) -> wire.EngineStats:
        return wire.EngineStats(
            num_running=len(self.sequences),
            num_free_blocks=self.num_blocks - self.num_used_blocks,
            num_blocks=self.num_blocks,
            prompt_tokens_total=self.num_prompt_tokens,
            generation_tokens_total=self.num_generated,
            prefix_query_tokens_total=self.num_prompt_tokens,
            steps_total=self.num_steps,
        )


def serve(socket: zmq.Socket[bytes]) -> None:
    start = wire.decode_to_worker(socket.recv())
    assert isinstance(start, wire.Start)
    engine = FakeEngine(read_behaviour(Path(start.config.model)))
    if not load(engine.behaviour, start, socket):
        return
    while True:
        has_work = bool(engine.sequences) and not engine.behaviour.is_stalled
        while socket.poll(0 if has_work else None):
            frame = wire.decode_to_worker(socket.recv())
            if isinstance(frame, wire.Submit):
                for prompt in frame.prompts:
                    engine.submit(prompt)
                if engine.behaviour.is_stalled:
                    socket.send(wire.encode(wire.Steps((), engine.stats())))
            elif isinstance(frame, wire.Abort):
                for sequence_id in frame.sequence_ids:
                    engine.sequences.pop(sequence_id, None)
                socket.send(wire.encode(wire.Steps((), engine.stats())))
            elif isinstance(frame, wire.ResizeCache | wire.Sleep | wire.Wake):
                socket.send(wire.encode(engine.change(frame)))
            elif isinstance(frame, wire.Shutdown) and not engine.behaviour.ignore_shutdown:
                return
            has_work = bool(engine.sequences) and not engine.behaviour.is_stalled
        if has_work:
            socket.send(wire.encode(wire.Steps(tuple(engine.step()), engine.stats())))


def load(behaviour: Behaviour, start: wire.Start, socket: zmq.Socket[bytes]) -> bool:
    """Pretend to load; false after `Fatal`."""
    socket.send(wire.encode(wire.Progress("loading weights", 1, 2)))
    with (Path(start.config.model) / "loads.txt").open("a") as file:
        file.write(f"{os.getpid()} {start.config.memory_budget_bytes}\n")
    time.sleep(behaviour.load_delay_s)
    if behaviour.die_while_loading:
        os._exit(9)
    error = behaviour.load_error
    if (start.config.memory_budget_bytes or 0) < behaviour.fixed_bytes:
        error = ("insufficient_memory", "The weights do not fit.")
    if error is not None:
        socket.send(wire.encode(wire.Fatal(*error)))
        return False
    socket.send(wire.encode(wire.Progress("loading weights", 2, 2)))
    socket.send(wire.encode(wire.Ready(facts(behaviour, Path(start.config.model)))))
    return True


def facts(behaviour: Behaviour, model: Path) -> wire.WorkerFacts:
    pooling = read_pooling(model)
    task = pooling.task if pooling is not None else "generate"
    return wire.WorkerFacts(
        architecture="fake",
        dtype="float32",
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        num_parameters=1000,
        weight_bytes=behaviour.fixed_bytes,
        fixed_bytes=behaviour.fixed_bytes,
        max_kv_blocks=MOST_BLOCKS,
        kv_bytes_per_token=behaviour.bytes_per_token,
        num_kv_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        task=task,
        embedding_length=EMBEDDING_LENGTH if task == "embed" else 0,
        load_seconds=behaviour.load_delay_s,
    )


def read_behaviour(model: Path) -> Behaviour:
    file = model / "fake_worker.json"
    return msgspec.json.decode(file.read_bytes(), type=Behaviour) if file.exists() else Behaviour()


def exit_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--connect", required=True)
    endpoint = parser.parse_args().connect
    threading.Thread(target=exit_with_parent, daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(endpoint)
    serve(socket)
    socket.close(linger=1000)
    context.term()


if __name__ == "__main__":
    main()

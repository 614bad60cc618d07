"""A KV cache that grows and shrinks, and a model that sleeps, change no token: on both backends of a CPU."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.api.config import EngineConfig
from engine.api.errors import ContextLengthExceeded, EngineAsleep, EngineBusy, InsufficientMemory
from engine.api.output import StepOutput
from engine.api.request import Prompt
from engine.api.sampling import SamplingParams
from engine.attention.backend import AttentionBackend, AttentionSpec, CacheSpec
from engine.attention.compiled_paged import CompiledPagedAttention
from engine.attention.reserved_memory import ReservedMemory
from engine.attention.torch_paged import TorchPagedAttention
from engine.loop import EngineLoop
from engine.runner.recorded_steps import RecordedSteps
from tests.fakes.checkpoints import write_hf_checkpoint

GREEDY = SamplingParams(temperature=0.0)
MAX_MODEL_LEN = 96
MIB = 2**20

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module", params=["compiled", "torch", "torch, two in flight"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineLoop:
    """Room for 48 blocks, of which 24 are there at first; widths that the compiled path does not serve, or does.

    Recorded steps keep their results until the next one only, so those never have two in flight.
    """
    is_compiled = request.param == "compiled"
    path = tmp_path_factory.mktemp("qwen3")
    write_hf_checkpoint(path, "qwen3", intermediate_size=128 if is_compiled else 120)
    config = EngineConfig(
        model=str(path),
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        block_size=16,
        num_kv_blocks=24,
    )
    loop = EngineLoop(config)
    assert isinstance(loop._runner.replayed, RecordedSteps) == is_compiled
    if "two" in request.param:
        loop._pipeline_depth = 2
    return loop


def alone(engine: EngineLoop, prompt: Prompt) -> tuple[int, ...]:
    """What the prompt generates with nothing beside it and nothing cached."""
    engine._scheduler.forget_prefixes()
    engine.submit(prompt)
    return tuple(token_id for output in finish(engine) for token_id in output.token_ids)


def finish(engine: EngineLoop) -> list[StepOutput]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def some_prompts(chance: random.Random, count: int) -> list[Prompt]:
    shared = tuple(chance.randrange(3, 300) for _ in range(40))
    prompts = []
    for sequence_id in range(1, 1 + count):
        own = tuple(chance.randrange(3, 300) for _ in range(chance.randint(1, 30)))
        prompts.append(Prompt(sequence_id, shared[: chance.choice([0, 17, 40])] + own, chance.randint(1, 24), GREEDY))
    return prompts


@pytest.mark.parametrize("seed", range(3))
def test_tokens_do_not_depend_on_how_the_cache_changes(engine: EngineLoop, seed: int) -> None:
    chance = random.Random(seed)
    prompts = some_prompts(chance, 12)
    engine.resize_cache(24)
    expected = {prompt.sequence_id: alone(engine, prompt) for prompt in prompts}

    engine._scheduler.forget_prefixes()
    got: dict[int, list[int]] = {prompt.sequence_id: [] for prompt in prompts}
    ends: list[int] = []
    waiting = list(prompts)
    num_moves = 0
    while waiting or engine.has_work:
        for prompt in waiting[: chance.randrange(4)]:
            engine.submit(prompt)
            waiting.remove(prompt)
        pool = engine._scheduler.block_pool
        num_in_use = pool.num_blocks - pool.num_free
        wanted = max(6, chance.choice([0, num_in_use - 1, num_in_use, num_in_use + 1, 24, 40]))
        memory = engine.resize_cache(wanted)
        num_moves += len(engine._scheduler._moved)
        assert memory.num_kv_blocks == pool.num_blocks == wanted
        assert memory.max_model_len == MAX_MODEL_LEN
        for output in engine.step():
            got[output.sequence_id] += output.token_ids
            ends += [output.sequence_id] * (output.finish_reason is not None)
    assert {sequence_id: tuple(token_ids) for sequence_id, token_ids in got.items()} == expected
    assert sorted(ends) == sorted(expected)
    assert num_moves > 0
    pool.check_integrity()


def test_prefixes_are_still_found_after_their_blocks_moved(engine: EngineLoop) -> None:
    engine.resize_cache(40)
    prompt = Prompt(1, tuple(range(5, 69)), 4, GREEDY)
    expected = alone(engine, prompt)
    blocker = Prompt(2, tuple(range(70, 90)), 4, GREEDY)
    engine.submit(blocker)
    finish(engine)
    cached = [engine._scheduler.block_pool.num_cached, engine.resize_cache(6).num_kv_blocks]
    assert cached == [5, 6]
    engine.submit(prompt)
    outputs = finish(engine)
    assert outputs[0].num_cached_tokens == 48
    assert tuple(token_id for output in outputs for token_id in output.token_ids) == expected


def test_a_cache_shrinks_no_further_than_its_largest_sequence(engine: EngineLoop) -> None:
    engine.resize_cache(40)
    engine.submit(Prompt(1, (5, 6, 7), 60, GREEDY))
    outputs = engine.step()
    memory = engine.resize_cache(1)
    assert memory.num_kv_blocks == 4
    with pytest.raises(ContextLengthExceeded) as refused:
        engine.submit(Prompt(2, (5,) * 64, 1, GREEDY))
    assert refused.value.available_tokens == 64
    assert len(outputs + finish(engine)) == 60
    assert engine.resize_cache(1).num_kv_blocks == 1
    assert engine.resize_cache(1000).num_kv_blocks == engine.facts.max_kv_blocks == 48


def test_what_was_in_flight_comes_with_the_next_step_and_an_abort_is_the_last_word(engine: EngineLoop) -> None:
    for sequence_id in (1, 2):
        engine.submit(Prompt(sequence_id, (5, 6, 7), 8, GREEDY))
    outputs = engine.step()
    engine.resize_cache(30)
    assert engine.has_work
    assert engine.abort(1) is not None
    outputs += finish(engine)
    assert [output.sequence_id for output in outputs].count(1) == 2 - engine._pipeline_depth
    assert sum(len(output.token_ids) for output in outputs if output.sequence_id == 2) == 8


def test_sleep_forgets_the_cache_and_waking_brings_all_else_back(engine: EngineLoop) -> None:
    engine.resize_cache(24)
    prompt = Prompt(1, tuple(range(5, 45)), 6, GREEDY)
    expected = alone(engine, prompt)
    engine.submit(prompt)
    with pytest.raises(EngineBusy, match="open sequences"):
        engine.sleep()
    finish(engine)

    asleep = engine.sleep()
    assert (asleep.is_asleep, asleep.num_kv_blocks) == (True, 0)
    assert asleep.host_bytes == engine.facts.weight_bytes
    assert asleep.fixed_bytes > 0
    assert engine.sleep().is_asleep
    for refused in (lambda: engine.submit(prompt), lambda: engine.resize_cache(9)):
        with pytest.raises(EngineAsleep, match="wake it first"):
            refused()

    assert engine.wake(0).num_kv_blocks == 1, "a prompt and an output token fit in any case"
    engine.sleep()
    awake = engine.wake(30)
    assert (awake.is_asleep, awake.num_kv_blocks, awake.host_bytes) == (False, 30, 0)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks == 30
    engine.submit(prompt)
    outputs = finish(engine)
    assert outputs[0].num_cached_tokens == 0
    assert tuple(token_id for output in outputs for token_id in output.token_ids) == expected


def test_nothing_is_prepared_while_the_model_sleeps(engine: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[str] = []
    wanting = SimpleNamespace(has_wanted=True, capture_wanted=lambda: captured.append("a graph"))
    with monkeypatch.context() as patched:
        patched.setattr(engine._runner, "replayed", wanting)
        engine.sleep()
        assert not engine.has_spare_work
        engine.spare_step()
        assert captured == []
        engine.wake(24)
        assert engine.has_spare_work
        engine.spare_step()
    assert captured == ["a graph"]


def test_waking_without_room_for_a_cache_sleeps_on(engine: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(num_blocks: int) -> int:
        raise InsufficientMemory("There is no memory for the KV cache; stop others.")

    engine.resize_cache(24)
    asleep = engine.sleep()
    with monkeypatch.context() as patched:
        patched.setattr(engine._attention, "resize", no_room)
        with pytest.raises(InsufficientMemory):
            engine.wake(24)
    assert engine.memory().is_asleep
    assert engine.memory().host_bytes == asleep.host_bytes
    assert engine.wake(24).num_kv_blocks == 24


def test_what_ended_in_flight_comes_although_the_model_sleeps(engine: EngineLoop) -> None:
    engine.submit(Prompt(1, (5, 6, 7), 1, GREEDY))
    outputs = [] if engine._pipeline_depth == 1 else engine.step()
    assert outputs == []
    engine.resize_cache(24)
    if engine._pipeline_depth == 1:
        outputs += engine.step()
    assert engine.sleep().is_asleep
    assert engine.has_work == (engine._pipeline_depth == 2)
    outputs += finish(engine)
    assert [output.finish_reason for output in outputs] == ["length"]
    engine.wake(24)


def test_blocks_that_cannot_be_moved_end_their_sequences_with_one_error_each(
    engine: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(sources: Sequence[int], targets: Sequence[int]) -> None:
        raise torch.cuda.OutOfMemoryError("no memory to copy with")

    engine.resize_cache(40)
    for sequence_id in (1, 2):
        engine.submit(Prompt(sequence_id, tuple(range(5, 45)), 8, GREEDY))
    outputs = engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine._attention, "move_blocks", no_room)
        assert engine.resize_cache(7).num_kv_blocks == 7
    outputs += finish(engine)
    ends = {output.sequence_id: output.finish_reason for output in outputs if output.finish_reason is not None}
    assert ends == {1: "error", 2: "error"}
    assert sum(output.finish_reason is not None for output in outputs) == 2
    engine._scheduler.block_pool.check_integrity()
    assert engine.stats().num_free_blocks == 7
    assert len(alone(engine, Prompt(3, (5, 6, 7), 4, GREEDY))) == 4


def backends() -> Sequence[AttentionBackend]:
    """One megabyte for a block."""
    cache = CacheSpec(num_layers=4, num_kv_heads=4, head_dim=64, block_size=128, dtype=torch.float32)
    spec = AttentionSpec(cache, num_heads=4, max_num_seqs=1)
    assert cache.bytes_per_block == MIB
    return [backend(spec, torch.device("cpu")) for backend in (CompiledPagedAttention, TorchPagedAttention)]


def contents(backend: AttentionBackend, first: int, end: int) -> torch.Tensor:
    """Keys and values of blocks [first, end), as [blocks, numbers], whatever the layout."""
    if isinstance(backend, CompiledPagedAttention):
        return backend._blocks[first:end].flatten(1)
    assert isinstance(backend, TorchPagedAttention)
    caches = torch.stack([cache[:, first * 128 : end * 128] for cache in (backend._keys, backend._values)])
    return caches.unflatten(2, (-1, 128)).movedim(2, 0).flatten(1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
def test_memory_is_taken_as_blocks_are_used_and_given_back(backend: AttentionBackend) -> None:
    backend.allocate(64, max_blocks=4096)
    assert backend.max_blocks == 4096
    before = held_bytes(backend)
    address = backend._memory.bytes.data_ptr()
    used = fill(backend, 64)
    assert held_bytes(backend) - before > 63 * MIB

    backend.move_blocks([60, 63], [2, 0])
    used[2], used[0] = used[60], used[63]
    assert backend.resize(16) == 16
    assert held_bytes(backend) - before < 20 * MIB
    assert torch.equal(contents(backend, 0, 16), used[:16, None].expand(-1, MIB // 4))
    assert backend.resize(5000) == 4096
    assert backend._memory.bytes.data_ptr() == address
    assert not contents(backend, 16, 64).any()
    assert backend.resize(0) == 0
    assert held_bytes(backend) - before < 4 * MIB


def held_bytes(backend: AttentionBackend) -> int:
    """What the system has given beneath the addresses of the cache, and of others in one piece with them."""
    start = backend._memory.bytes.data_ptr()
    end = start + backend._memory.bytes.nbytes
    held, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(place[1], 16) < end and start < int(place[2], 16)
        elif is_inside and line.startswith("Anonymous:"):
            held += 1024 * int(line.split()[1])
    return held


def fill(backend: AttentionBackend, num_blocks: int) -> torch.Tensor:
    """Write the number of each block, from 1, all over it; returns those numbers."""
    numbers = torch.arange(1.0, num_blocks + 1)
    if isinstance(backend, CompiledPagedAttention):
        backend._blocks[:num_blocks] = numbers[:, None, None]
    else:
        assert isinstance(backend, TorchPagedAttention)
        for cache in (backend._keys, backend._values):
            cache[:, : num_blocks * 128] = numbers.repeat_interleave(128)[:, None, None]
    return numbers


def test_memory_that_is_given_back_reads_as_zeros_from_whole_pages_on() -> None:
    memory = ReservedMemory(10 * MIB)
    memory.bytes.fill_(7)
    memory.release(MIB + 1, 9 * MIB)
    assert memory.bytes[: MIB + 1].min() == 7
    assert not memory.bytes[MIB + 4096 : 9 * MIB].any()
    assert memory.bytes[9 * MIB :].min() == 7

"""An engine on a GPU that sleeps and wakes: the device's memory goes, the tokens and the graphs stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import LLM
from engine.api.errors import EngineAsleep, EngineBusy, InsufficientMemory
from engine.loop import EngineLoop
from engine.runner import pinned_memory
from engine.runner.captured_steps import CapturedSteps
from engine.runner.cuda_driver import cuda_driver_for
from engine.runner.device_arena import DeviceArena
from tests.gpu.engines import capture_graphs, free_bytes, prompts, run, small_llm, write_large_config, write_small_model

GIB = 2**30


def captured_sizes(engine: EngineLoop) -> list[tuple[int, ...]]:
    replayed = engine._runner.replayed
    assert isinstance(replayed, CapturedSteps)
    return [ladder.captured_sizes for ladder in replayed.ladders]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """1 GiB of weights and 2 GiB of KV cache."""
    path = tmp_path_factory.mktemp("large")
    write_large_config(path)
    num_blocks = 2 * GIB // (2 * 8 * 8 * 128 * 2 * 16)
    yield LLM(path, load_format="dummy", device="cuda", max_num_seqs=16, num_kv_blocks=num_blocks)
    gc.collect()


@pytest.mark.gpu
def test_tokens_and_graphs_are_the_same_after_every_sleep(tmp_path: Path) -> None:
    write_small_model(tmp_path)
    engine = small_llm(tmp_path, 300).engine
    wanted = [prompts(count, max_tokens=40, longest=60, seed=count) for count in (1, 5)]
    expected = [run(engine, some) for some in wanted]
    capture_graphs(engine)
    assert [run(engine, some) for some in wanted] == expected
    graphs = captured_sizes(engine)
    assert all(graphs)
    for num_blocks in (300, 64, 512):
        memory = engine.sleep()
        assert (memory.is_asleep, memory.num_kv_blocks) == (True, 0)
        memory = engine.wake(num_blocks)
        assert (memory.is_asleep, memory.num_kv_blocks, memory.host_bytes) == (False, num_blocks, 0)
        assert [run(engine, some) for some in wanted] == expected
        assert captured_sizes(engine) == graphs


@pytest.mark.gpu
@pytest.mark.usefixtures("alone_on_the_gpu")
def test_a_sleeper_gives_its_memory_back_and_takes_it_again(large: LLM) -> None:
    engine = large.engine
    expected = run(engine, prompts(3, max_tokens=20, longest=60))
    capture_graphs(engine)
    before = free_bytes()
    memory = engine.sleep()
    weight_bytes = large.facts.weight_bytes
    assert weight_bytes - 2**20 < memory.host_bytes < weight_bytes + 2**20
    assert free_bytes() - before > weight_bytes + 2 * GIB - 2**27
    assert memory.fixed_bytes < large.facts.fixed_bytes - weight_bytes // 2
    with pytest.raises(EngineAsleep):
        engine.submit(prompts(1, max_tokens=2, longest=9)[0])
    with pytest.raises(EngineAsleep):
        engine.resize_cache(100)
    other = torch.full((2 * GIB,), 255, dtype=torch.uint8, device="cuda")
    del other
    torch.cuda.empty_cache()
    engine.wake(large.facts.num_kv_blocks)
    assert abs(free_bytes() - before) < 2**29
    assert run(engine, prompts(3, max_tokens=20, longest=60)) == expected


@pytest.mark.gpu
@pytest.mark.usefixtures("alone_on_the_gpu")
def test_what_cannot_wake_sleeps_on(large: LLM) -> None:
    engine = large.engine
    # Prompts that no test has run before: with a cached prefix the last bits would be others than after a sleep.
    wanted = prompts(3, max_tokens=20, longest=60, seed=1)
    expected = run(engine, wanted)
    engine.sleep()
    driver = cuda_driver_for(torch.device("cuda:0"))
    assert driver is not None
    # Not from torch's allocator, which may not go beyond the engine's budget.
    others = DeviceArena(driver, large_bytes := free_bytes() - GIB // 2)
    others.grow_to(large_bytes)
    with pytest.raises(InsufficientMemory):
        engine.wake(large.facts.num_kv_blocks)
    assert engine.memory().is_asleep
    others.unmap_all()
    engine.wake(large.facts.num_kv_blocks)
    assert run(engine, wanted) == expected


@pytest.mark.gpu
def test_what_cannot_sleep_stays_awake(large: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = large.engine
    (prompt,) = prompts(1, max_tokens=20, longest=60)
    expected = run(engine, [prompt])
    with monkeypatch.context() as patch:
        patch.setattr(pinned_memory, "available_host_bytes", lambda: GIB)
        with pytest.raises(InsufficientMemory, match="RAM"):
            engine.sleep()
    assert run(engine, [prompt]) == expected
    engine.submit(prompt)
    with pytest.raises(EngineBusy):
        engine.sleep()
    while engine.has_work:
        engine.step()
    assert run(engine, [prompt]) == expected

"""A KV cache on a GPU that grows and shrinks beneath captured graphs: tokens stay, memory really comes and goes."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch

from engine.api.errors import InsufficientMemory
from engine.attention.backend import CacheSpec
from engine.attention.mapped_cache import MappedCache, move_blocks
from engine.runner.cuda_driver import cuda_driver_for
from engine.runner.device_arena import DeviceArena
from tests.gpu.engines import (
    by_position,
    capture_graphs,
    collect,
    free_bytes,
    prompts,
    run,
    small_llm,
    write_small_model,
)

GPU = torch.device("cuda:0")
GIB = 2**30
SLACK_BYTES = 256 * 2**20
"""What the driver may keep for its own tables, and for kernels that a test is the first to load."""
SPEC = CacheSpec(num_layers=4, num_kv_heads=8, head_dim=128, block_size=16, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    write_small_model(path)
    return path


@pytest.mark.gpu
@pytest.mark.usefixtures("alone_on_the_gpu")
def test_memory_comes_and_goes_beneath_one_address() -> None:
    driver = cuda_driver_for(GPU)
    assert driver is not None
    before = free_bytes()
    arena = DeviceArena(driver, 8 * GIB)
    assert before - free_bytes() < SLACK_BYTES
    arena.grow_to(3 * GIB)
    assert 3 * GIB <= before - free_bytes() < 3 * GIB + SLACK_BYTES
    tensor = arena.tensor()
    assert tensor.device == GPU
    tensor[: 3 * GIB] = 7
    arena.grow_to(5 * GIB)
    assert tensor[: 3 * GIB].eq(7).all()
    arena.shrink_to(1 * GIB)
    assert before - free_bytes() < 1 * GIB + 1 * GIB // 16 + 2 * SLACK_BYTES
    assert tensor[: 1 * GIB].eq(7).all()
    assert arena.tensor().data_ptr() == tensor.data_ptr()
    arena.unmap_all()
    assert before - free_bytes() < SLACK_BYTES
    with pytest.raises(InsufficientMemory, match="device memory"):
        DeviceArena(driver, 256 * GIB).grow_to(256 * GIB)
    del arena, tensor
    gc.collect()
    assert before - free_bytes() < SLACK_BYTES


@pytest.mark.gpu
def test_a_graph_finds_the_memory_that_came_again() -> None:
    driver = cuda_driver_for(GPU)
    assert driver is not None
    arena = DeviceArena(driver, GIB)
    arena.grow_to(GIB)
    numbers = arena.tensor().view(torch.int32)
    numbers.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.add_(1)
    graph.replay()
    graph.replay()
    assert numbers.eq(2).all()
    arena.unmap_all()
    other = torch.ones(2 * GIB, dtype=torch.uint8, device=GPU)
    del other
    arena.grow_to(GIB)
    numbers.fill_(5)
    graph.replay()
    assert numbers.eq(6).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("alone_on_the_gpu")
def test_a_cache_is_zero_where_it_is_new_and_keeps_what_stays() -> None:
    driver = cuda_driver_for(GPU)
    assert driver is not None
    before = free_bytes()
    cache = MappedCache(SPEC, driver, 100, 200_000)
    regions = [*cache.keys, *cache.values]
    for number, region in enumerate(regions):
        assert region[:100].eq(0).all()
        region[:100] = number + 1
    num_blocks = 4 * GIB // SPEC.bytes_per_block
    assert cache.resize(num_blocks) == num_blocks
    assert 4 * GIB <= before - free_bytes() < 4 * GIB + SLACK_BYTES
    for number, region in enumerate(regions):
        assert region[:100].eq(number + 1).all()
        assert region[100:num_blocks].eq(0).all()
        region[num_blocks - 10 : num_blocks] = number + 30
    move_blocks(cache, range(num_blocks - 10, num_blocks), range(40, 50))
    got = cache.resize(100)
    assert 100 <= got < 200
    for number, region in enumerate(regions):
        assert region[:40].eq(number + 1).all()
        assert region[40:50].eq(number + 30).all()
        assert region[50:100].eq(number + 1).all()
    assert cache.resize(0) == 0
    assert before - free_bytes() < SLACK_BYTES


@pytest.mark.gpu
def test_tokens_stay_the_same_while_the_cache_changes_its_size_under_load(checkpoint: Path) -> None:
    wanted = [prompts(12, max_tokens=60, longest=300, seed=seed) for seed in range(3)]
    llm = small_llm(checkpoint, 512)
    expected = [run(llm.engine, some) for some in wanted]
    assert llm.facts.max_kv_blocks == 512
    del llm
    gc.collect()

    engine = small_llm(checkpoint, 96).engine
    rng = random.Random(1)
    sizes = []
    for some, tokens_expected in zip(wanted, expected, strict=True):
        tokens: dict[int, list[int]] = {prompt.sequence_id: [] for prompt in some}
        for prompt in some:
            engine.submit(prompt)
        while engine.has_work:
            collect(engine, tokens)
            if rng.random() < 0.2:
                sizes.append(engine.resize_cache(rng.choice((34, 64, 100, 200, 300, 512))).num_kv_blocks)
        assert by_position(some, tokens) == tokens_expected
        capture_graphs(engine)
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
    assert min(sizes) < 100 < 400 < max(sizes)
    assert engine.stats().preemptions_total > 0


@pytest.mark.gpu
def test_graphs_captured_after_a_shrink_read_no_block_that_is_gone(checkpoint: Path) -> None:
    engine = small_llm(checkpoint, 512).engine
    wanted = prompts(14, max_tokens=20, longest=400)
    expected = run(engine, wanted)
    memory = engine.resize_cache(34)
    assert memory.num_kv_blocks < 100
    # What is captured runs on padding, which reads through rows that sequences have left.
    capture_graphs(engine)
    torch.cuda.synchronize()
    assert run(engine, wanted) == expected

"""A KV cache whose tails are mapped and unmapped: what stays, what is zero, what it holds, and what is refused."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.api.errors import InsufficientMemory
from engine.attention import mapped_cache
from engine.attention.backend import CacheSpec
from engine.attention.mapped_cache import MappedCache, PlainCache, move_blocks
from engine.core.batch import BlockUpdate, ScheduledBatch
from engine.runner.rows import RowTable
from tests.fakes.memory_driver import FakeDriver

SPEC = CacheSpec(num_layers=2, num_kv_heads=2, head_dim=4, block_size=2, dtype=torch.bfloat16)
REGION_BLOCK_BYTES = 32
GRANULE = 3 * 32 + 32  # four blocks of a region
NUM_REGIONS = 4


@pytest.fixture(autouse=True)
def _no_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_cache, "SPARE_BYTES", 0)


def tensors(cache: MappedCache) -> list[torch.Tensor]:
    return [*cache.keys, *cache.values]


def mark(cache: MappedCache, block: int, value: float) -> None:
    for number, region in enumerate(tensors(cache)):
        region[block] = value + number


def assert_marked(cache: MappedCache, block: int, value: float) -> None:
    for number, region in enumerate(tensors(cache)):
        assert region[block].eq(value + number).all()


def test_addresses_and_contents_stay_while_the_size_changes():
    driver = FakeDriver(1 << 20, GRANULE)
    cache = MappedCache(SPEC, driver, num_blocks=6, max_blocks=100)
    addresses = [region.data_ptr() for region in tensors(cache)]
    assert tensors(cache)[0].shape == (100, 2, 2, 4)
    assert driver.mapped_bytes == cache.mapped_bytes == NUM_REGIONS * 2 * GRANULE
    assert all(region[:6].eq(0).all() for region in tensors(cache))
    for block in range(6):
        mark(cache, block, 10 * block + 1)
    assert cache.resize(90) == 90
    for block in range(6):
        assert_marked(cache, block, 10 * block + 1)
    assert all(region[6:90].eq(0).all() for region in tensors(cache))
    mark(cache, 89, 5)
    assert cache.resize(6) == 6
    assert driver.mapped_bytes == NUM_REGIONS * 2 * GRANULE
    assert cache.resize(0) == 0
    assert driver.mapped_bytes == 0
    assert cache.resize(90) == 90
    assert all(region[:90].eq(0).all() for region in tensors(cache))
    assert [region.data_ptr() for region in tensors(cache)] == addresses


def test_blocks_that_come_back_without_new_memory_are_zero_too():
    cache = MappedCache(SPEC, FakeDriver(1 << 20, GRANULE), num_blocks=8, max_blocks=8)
    mark(cache, 4, float("nan"))
    mark(cache, 5, float("nan"))
    mark(cache, 4, 3)
    assert cache.resize(5) == 5
    assert cache.resize(8) == 8
    assert_marked(cache, 4, 3)
    assert all(region[5:].eq(0).all() for region in tensors(cache))


def test_growth_ends_where_the_device_is_full_and_no_growth_at_all_is_an_error():
    driver = FakeDriver(NUM_REGIONS * 5 * GRANULE, GRANULE)
    cache = MappedCache(SPEC, driver, num_blocks=4, max_blocks=1000)
    assert cache.resize(1000) == 20
    assert all(region[4:20].eq(0).all() for region in tensors(cache))
    with pytest.raises(InsufficientMemory, match="smaller shares"):
        cache.resize(21)
    assert cache.mapped_bytes == driver.total_bytes
    mark(cache, 19, 2)
    assert_marked(cache, 19, 2)


def test_a_cache_without_room_leaves_nothing_behind():
    driver = FakeDriver(NUM_REGIONS * 5 * GRANULE, GRANULE)
    with pytest.raises(InsufficientMemory):
        MappedCache(SPEC, driver, num_blocks=21, max_blocks=30)
    gc.collect()
    assert (driver.mapped_bytes, driver.num_ranges) == (0, 0)


@pytest.mark.parametrize("moved_at_once", [1, 1 << 20])
def test_blocks_move_in_all_layers(monkeypatch: pytest.MonkeyPatch, moved_at_once: int):
    monkeypatch.setattr(mapped_cache, "_MOVED_AT_ONCE_BYTES", moved_at_once)
    cache = MappedCache(SPEC, FakeDriver(1 << 20, GRANULE), num_blocks=20, max_blocks=20)
    for block in range(20):
        mark(cache, block, 5 * block)
    move_blocks(cache, [19, 15, 17], [2, 0, 7])
    move_blocks(cache, [], [])
    for block, source in {2: 19, 0: 15, 7: 17, 1: 1, 19: 19}.items():
        assert_marked(cache, block, 5 * source)


def test_rows_name_no_block_that_is_gone():
    rows = RowTable(max_num_seqs=2, max_model_len=6, block_size=2, device=torch.device("cpu"))
    updates = (BlockUpdate(0, 0, (9, 3, 5)), BlockUpdate(1, 1, (8,)))
    rows.apply(ScheduledBatch(step=0, sequences=(), num_decodes=0, row_starts=(), block_updates=updates))
    rows.forget_blocks(5)
    assert rows.block_tables.tolist() == [[4, 3, 4], [0, 4, 0]]


def test_a_plain_cache_keeps_its_size():
    cache = PlainCache(SPEC, torch.device("cpu"), 5)
    assert cache.resize(0) == cache.resize(9) == cache.max_blocks == 5
    cache.keys[1][3] = 4
    move_blocks(cache, [3], [0])
    assert cache.keys[1][0].eq(4).all()
    assert cache.keys[0].eq(0).all()


@given(
    total_granules=st.integers(NUM_REGIONS, 60),
    max_blocks=st.integers(1, 60),
    targets=st.lists(st.integers(0, 60), max_size=12),
)
def test_any_sequence_of_sizes(total_granules: int, max_blocks: int, targets: list[int]):
    driver = FakeDriver(total_granules * GRANULE, GRANULE)
    cache = MappedCache(SPEC, driver, 1, max_blocks)
    num_blocks = 1
    mark(cache, 0, 1)
    for target in targets:
        try:
            got = cache.resize(target)
        except InsufficientMemory:
            assert target > num_blocks
            got = num_blocks
        else:
            assert got >= min(target, max_blocks) or target > num_blocks
            assert got <= max_blocks
            assert target > num_blocks or got <= num_blocks
        for region in tensors(cache):
            stays = region[: min(num_blocks, got)]
            assert not stays.isnan().any()
            assert region[num_blocks:got].eq(0).all()
        if num_blocks and got:
            assert_marked(cache, 0, 1)
        if got:
            mark(cache, 0, 1)
            mark(cache, got - 1, 1)
        num_blocks = got
        assert driver.mapped_bytes == cache.mapped_bytes
        assert cache.mapped_bytes <= num_blocks * SPEC.bytes_per_block + cache.rounding_bytes

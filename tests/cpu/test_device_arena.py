"""The bookkeeping of memory under fixed addresses, over a driver that checks every call."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.api.errors import InsufficientMemory
from engine.runner.device_arena import FINENESS, DeviceArena
from tests.fakes.memory_driver import FakeDriver

GRANULE = 64
KIB = 1024


def test_memory_comes_and_goes_beneath_an_address_that_stays():
    driver = FakeDriver(8 * KIB)
    arena = DeviceArena(driver, 4 * KIB)
    arena.grow_to(100)
    tensor = arena.tensor()
    assert (arena.mapped_bytes, len(tensor)) == (128, 4 * KIB)
    tensor[:128] = 7
    arena.grow_to(1 * KIB)
    assert tensor[:128].eq(7).all()
    arena.unmap_all()
    assert (arena.mapped_bytes, driver.mapped_bytes) == (0, 0)
    arena.grow_to(1 * KIB)
    tensor[: 1 * KIB] = 9
    assert arena.tensor().data_ptr() == tensor.data_ptr()
    assert arena.tensor()[: 1 * KIB].eq(9).all()


def test_the_range_lives_as_long_as_a_view_of_it():
    driver = FakeDriver(8 * KIB)
    arena = DeviceArena(driver, 4 * KIB)
    arena.grow_to(1)
    view = arena.tensor()[3:10].view(7)
    del arena
    gc.collect()
    assert (driver.num_ranges, driver.mapped_bytes) == (1, GRANULE)
    del view
    gc.collect()
    assert (driver.num_ranges, driver.mapped_bytes) == (0, 0)


def test_nothing_is_unmapped_before_the_device_has_finished():
    driver = FakeDriver(8 * KIB)
    arena = DeviceArena(driver, 4 * KIB)
    arena.grow_to(4 * KIB)
    assert driver.num_synchronized == 0
    arena.shrink_to(4 * KIB)
    assert driver.num_synchronized == 0
    arena.shrink_to(0)
    assert driver.num_synchronized == 1


def test_a_range_is_filled_in_few_pieces_none_of_them_large_beside_what_is_before_it():
    driver = FakeDriver(1 << 30)
    arena = DeviceArena(driver, 800 * GRANULE)
    arena.grow_to(800 * GRANULE)
    position = 0
    for size in driver.piece_sizes:
        assert size <= max(GRANULE, position // FINENESS)
        position += size
    assert len(driver.piece_sizes) < 100


def test_a_full_device_leaves_an_arena_as_it_was():
    driver = FakeDriver(1 * KIB)
    arena = DeviceArena(driver, 4 * KIB)
    arena.grow_to(512)
    with pytest.raises(InsufficientMemory):
        arena.grow_to(2 * KIB)
    assert arena.mapped_bytes == driver.mapped_bytes == 512
    arena.grow_to(1 * KIB)
    assert arena.mapped_bytes == 1 * KIB


@given(
    num_bytes=st.integers(1, 40 * KIB),
    total_bytes=st.integers(0, 40 * KIB),
    least_piece_bytes=st.integers(0, 2 * KIB),
    targets=st.lists(st.integers(0, 40 * KIB), max_size=30),
)
def test_any_sequence_of_sizes_keeps_the_account(
    num_bytes: int, total_bytes: int, least_piece_bytes: int, targets: list[int]
):
    driver = FakeDriver(total_bytes)
    arena = DeviceArena(driver, num_bytes, least_piece_bytes=least_piece_bytes)
    for target in targets:
        target = min(target, num_bytes)
        before = arena.mapped_bytes
        whole = -(-target // GRANULE) * GRANULE
        if target <= before:
            arena.shrink_to(target)
            largest = max(GRANULE, before // FINENESS, least_piece_bytes)
            assert whole <= arena.mapped_bytes < max(whole, 1) + largest
        else:
            try:
                arena.grow_to(target)
                assert arena.mapped_bytes == whole
            except InsufficientMemory:
                assert whole > total_bytes
                assert arena.mapped_bytes == before
        assert arena.mapped_bytes == driver.mapped_bytes <= max(total_bytes, 0)
        if arena.mapped_bytes:
            assert isinstance(arena.tensor(), torch.Tensor)
    del arena
    assert driver.num_ranges == 0

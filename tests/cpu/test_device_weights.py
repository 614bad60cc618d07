"""Weights that sleep in pinned memory: bytes, addresses, what is held where, and failures that change nothing."""

from __future__ import annotations

import errno
import gc
import time

import pytest
import torch

from engine.api.errors import EngineError, InsufficientMemory
from engine.kernels.torch_ops import TorchOps
from engine.layers.linear import Linear
from engine.layers.placement import Placement
from engine.runner import pinned_memory
from engine.runner.device_weights import ALIGNMENT_BYTES, DeviceWeights, device_weights
from engine.runner.weight_memory import SleeplessWeights
from tests.fakes.memory_driver import FakeDriver

CHUNK = 4096
TOTAL = 1 << 20


def filled(driver: FakeDriver) -> tuple[DeviceWeights, list[torch.Tensor], list[torch.Tensor]]:
    """Weights, their parameters, and copies of those."""
    weights = DeviceWeights(driver, 20_000, TOTAL, chunk_bytes=CHUNK)
    parameters = [weights.empty(shape, torch.float32) for shape in ((33, 40), (7,), (50, 90), (1,))]
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        parameter.normal_(generator=generator)
    return weights, parameters, [parameter.clone() for parameter in parameters]


def used_bytes(parameters: list[torch.Tensor]) -> int:
    return parameters[-1].data_ptr() + parameters[-1].nbytes - parameters[0].data_ptr()


def wait_until_unpinned(driver: FakeDriver) -> None:
    deadline = time.monotonic() + 10
    while driver.pinned and time.monotonic() < deadline:
        time.sleep(0.001)


def test_parameters_lie_apart_and_aligned():
    driver = FakeDriver(TOTAL, ALIGNMENT_BYTES)
    weights, parameters, copies = filled(driver)
    assert all(parameter.data_ptr() % ALIGNMENT_BYTES == 0 for parameter in parameters)
    assert all(torch.equal(parameter, copy) for parameter, copy in zip(parameters, copies, strict=True))
    assert used_bytes(parameters) <= weights.mapped_bytes == driver.mapped_bytes
    assert weights.mapped_bytes < used_bytes(parameters) + 2 * ALIGNMENT_BYTES


def test_weights_sleep_and_wake_where_they_were_as_often_as_wished():
    driver = FakeDriver(TOTAL, ALIGNMENT_BYTES)
    weights, parameters, copies = filled(driver)
    weights.wake()
    for _ in range(3):
        assert weights.sleep() == weights.sleep() == used_bytes(parameters)
        assert (weights.mapped_bytes, driver.mapped_bytes) == (0, 0)
        assert sum(driver.pinned.values()) == used_bytes(parameters)
        assert max(driver.pinned.values()) == CHUNK
        weights.wake()
        assert all(torch.equal(parameter, copy) for parameter, copy in zip(parameters, copies, strict=True))
        weights.settle()
    wait_until_unpinned(driver)
    assert driver.pinned == {}


def test_weights_called_back_while_they_wake_sleep_on():
    driver = FakeDriver(TOTAL, ALIGNMENT_BYTES)
    weights, parameters, copies = filled(driver)
    weights.sleep()
    pinned = dict(driver.pinned)
    weights.wake()
    assert weights.sleep() == used_bytes(parameters)
    assert (weights.mapped_bytes, driver.pinned) == (0, pinned)
    weights.wake()
    weights.settle()
    assert all(torch.equal(parameter, copy) for parameter, copy in zip(parameters, copies, strict=True))
    wait_until_unpinned(driver)
    assert driver.pinned == {}


def test_no_room_to_pin_changes_nothing():
    driver = FakeDriver(TOTAL, ALIGNMENT_BYTES)
    weights, parameters, copies = filled(driver)
    driver.most_pinned_bytes = 2 * CHUNK
    with pytest.raises(InsufficientMemory, match="pins no more"):
        weights.sleep()
    assert driver.pinned == {}
    assert weights.mapped_bytes >= used_bytes(parameters)
    assert all(torch.equal(parameter, copy) for parameter, copy in zip(parameters, copies, strict=True))
    driver.most_pinned_bytes = TOTAL
    assert weights.sleep() == used_bytes(parameters)


def test_too_little_ram_is_said_before_any_is_taken(monkeypatch: pytest.MonkeyPatch):
    driver = FakeDriver(TOTAL, ALIGNMENT_BYTES)
    weights, _, _ = filled(driver)
    monkeypatch.setattr(pinned_memory, "available_host_bytes", lambda: pinned_memory.SPARE_BYTES)
    with pytest.raises(InsufficientMemory, match=r"RAM has no .* unload the model instead"):
        weights.sleep()
    assert driver.pinned == {}


def test_a_system_that_gives_no_ram_after_all_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    driver = FakeDriver(TOTAL, ALIGNMENT_BYTES)
    weights, parameters, copies = filled(driver)

    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(pinned_memory.mmap, "mmap", refuse)
        with pytest.raises(InsufficientMemory, match="RAM has no"):
            weights.sleep()
    assert driver.pinned == {}
    assert all(torch.equal(parameter, copy) for parameter, copy in zip(parameters, copies, strict=True))
    assert weights.sleep() == used_bytes(parameters)


def test_weights_sleep_on_while_another_has_the_device():
    driver = FakeDriver(TOTAL, ALIGNMENT_BYTES)
    weights, parameters, copies = filled(driver)
    weights.sleep()
    other = driver.reserve(TOTAL)
    driver.map_new(other, TOTAL)
    with pytest.raises(InsufficientMemory):
        weights.wake()
    assert weights.mapped_bytes == 0
    driver.unmap(other, TOTAL)
    weights.wake()
    assert all(torch.equal(parameter, copy) for parameter, copy in zip(parameters, copies, strict=True))


def test_the_device_has_its_memory_back_with_the_last_parameter():
    driver = FakeDriver(TOTAL, ALIGNMENT_BYTES)
    weights, parameters, _ = filled(driver)
    del weights
    gc.collect()
    assert driver.num_ranges == 1
    parameters.clear()
    gc.collect()
    assert (driver.num_ranges, driver.mapped_bytes) == (0, 0)


def test_layers_take_their_parameters_from_the_memory_they_are_given():
    driver = FakeDriver(TOTAL, ALIGNMENT_BYTES)
    weights = DeviceWeights(driver, 1, TOTAL)
    placement = Placement(torch.device("cpu"), torch.float32, TorchOps(), memory=weights)
    linear = Linear(8, {"a": 4, "b": 12}, placement, bias=True)
    linear.weight.fill_(1.0)
    assert linear.bias is not None
    linear.bias.fill_(2.0)
    assert linear(torch.ones(1, 8)).eq(10.0).all()
    assert weights.sleep() == ALIGNMENT_BYTES + 16 * 4
    weights.wake()
    assert linear(torch.ones(1, 8)).eq(10.0).all()


def test_where_nothing_can_be_mapped_nothing_sleeps():
    assert device_weights(torch.device("cpu"), 1, 2) is None
    with pytest.raises(EngineError, match="cannot sleep"):
        SleeplessWeights().sleep()

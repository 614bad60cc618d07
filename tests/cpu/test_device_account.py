"""The account of a device, with figures in place of a GPU: what is bounded, what is counted, and what is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.api.config import EngineConfig
from engine.api.errors import InsufficientMemory
from engine.runner import device as devices
from engine.runner.device_account import MOST_DRIVER_BYTES, DeviceAccount
from engine.runner.memory import GIB, MIB

WEIGHTS = 4 * GIB
BUDGET = 20 * GIB
CONTEXT_BYTES = 500 * MIB
"""What the driver is found to hold for the process."""


class Gpu:
    """`total_bytes` of memory; notes how the allocator is bound, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total_bytes: int = 64 * GIB) -> None:
        self.bounds: list[int] = []
        self.allocated_bytes = 0
        self.mapped_seen: list[int] = []
        monkeypatch.setattr(devices, "total_memory_bytes", lambda device: total_bytes)
        monkeypatch.setattr(devices, "measure_outside_bytes", self._measure_outside)
        monkeypatch.setattr(
            torch.cuda,
            "set_per_process_memory_fraction",
            lambda share, device: self.bounds.append(round(share * total_bytes)),
        )
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated_bytes)

    def _measure_outside(self, device: torch.device, in_use_before: int | None, *, mapped_bytes: int) -> int:
        self.mapped_seen.append(mapped_bytes)
        return CONTEXT_BYTES


def account(
    *, device: str = "cuda:0", mapped_weights: int = 0, mapped_cache: int = 0, before: int | None = None, **model: Any
) -> DeviceAccount:
    return DeviceAccount(
        EngineConfig(model="x", memory_budget_bytes=BUDGET),
        SimpleNamespace(**{"weight_bytes": WEIGHTS, "weight_maps": [], **model}),  # type: ignore[arg-type]
        SimpleNamespace(mapped_bytes=mapped_weights),  # type: ignore[arg-type]
        torch.device(device),
        before,
        SimpleNamespace(mapped_bytes=mapped_cache),  # type: ignore[arg-type]
    )


def test_the_allocator_gets_what_the_budget_leaves_beside_what_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    one = account(mapped_weights=5 * GIB, mapped_cache=GIB, before=100 * MIB)
    one.bound_allocator()
    assert one.measure_outside() == CONTEXT_BYTES + 100 * MIB
    assert gpu.mapped_seen == [6 * GIB]
    one.bound_allocator()
    assert gpu.bounds == [14 * GIB, 14 * GIB - CONTEXT_BYTES - 100 * MIB]
    account(mapped_cache=30 * GIB).bound_allocator()
    assert gpu.bounds[-1] == 0


@pytest.mark.parametrize(
    ("total_gib", "before", "counted"),
    [(64, None, 0), (64, 40 * GIB, MOST_DRIVER_BYTES), (8, 40 * GIB, 256 * MIB), (8, 200 * MIB, 200 * MIB)],
)
def test_of_what_was_in_use_before_the_driver_has_a_part(
    monkeypatch: pytest.MonkeyPatch, total_gib: int, before: int | None, counted: int
) -> None:
    Gpu(monkeypatch, total_gib * GIB)
    assert account(before=before).measure_outside() == CONTEXT_BYTES + counted


def test_weights_are_counted_once_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    gpu.allocated_bytes = WEIGHTS + 7 * MIB
    from_allocator = account()
    assert (from_allocator.held_weight_bytes, from_allocator.allocated_bytes()) == (WEIGHTS, 7 * MIB)
    gpu.allocated_bytes = 7 * MIB
    mapped = account(mapped_weights=WEIGHTS + 2 * MIB)
    assert (mapped.held_weight_bytes, mapped.allocated_bytes()) == (WEIGHTS + 2 * MIB, 7 * MIB)


def test_a_step_that_has_no_room_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(device: torch.device, run: object) -> int:
        raise torch.cuda.OutOfMemoryError("no memory")

    Gpu(monkeypatch)
    monkeypatch.setattr(devices, "workspace_peak_bytes", no_room)
    with pytest.raises(InsufficientMemory, match=r"step of 8,192 tokens beside the weights of 4\.00 GiB"):
        account().workspace_peak_bytes(8192, lambda: None)


def test_on_a_cpu_the_process_counts_without_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "own_memory_bytes", lambda: 5 * GIB)
    assert account(device="cpu").held_bytes() == GIB
    in_files = account(device="cpu", weight_maps=[SimpleNamespace(num_bytes=3 * GIB)])
    assert in_files.held_bytes() == 4 * GIB, "pages of files are not the process's own"
    assert account(device="cpu", weight_bytes=6 * GIB).held_bytes() == 0
    assert in_files.reachable_bytes() is None
    in_files.bound_allocator()

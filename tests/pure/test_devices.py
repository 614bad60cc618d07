"""Which devices there are and what they have, with a stand-in for NVIDIA's library."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from app.residency.devices import measure, measure_all, process_memory_bytes

GIB = 2**30


class FakeNvml:
    """Three GPUs, told apart by their totals; their names as CUDA_VISIBLE_DEVICES may list them."""

    NVMLError = type("NVMLError", (Exception,), {})
    totals = (24 * GIB, 48 * GIB, 80 * GIB)
    uuids = ("GPU-a", "GPU-b", "GPU-c")

    def __init__(self, *, has_driver: bool = True) -> None:
        self.has_driver = has_driver
        self.num_open = 0

    def nvmlInit(self) -> None:  # noqa: N802  # NVML's own names
        if not self.has_driver:
            raise self.NVMLError
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.totals)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index >= len(self.totals):
            raise self.NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return self.uuids.index(uuid)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=self.totals[handle], used=handle * GIB)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def gib_of(device: str) -> list[tuple[str, int]]:
    return [(memory.device, memory.total_bytes // GIB) for memory in measure_all(device)]


def test_auto_is_every_gpu(nvml: FakeNvml) -> None:
    assert gib_of("auto") == gib_of("cuda") == [("cuda:0", 24), ("cuda:1", 48), ("cuda:2", 80)]
    assert [memory.used_bytes for memory in measure_all("auto")] == [0, GIB, 2 * GIB]
    assert nvml.num_open == 0


def test_one_gpu_by_its_number(nvml: FakeNvml) -> None:
    assert gib_of("cuda:1") == [("cuda:1", 48)]
    assert measure("auto").device == "cuda:0"


def test_cuda_counts_only_what_it_may_see(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-a")
    assert gib_of("auto") == [("cuda:0", 80), ("cuda:1", 24)]
    assert gib_of("cuda:1") == [("cuda:1", 24)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,-1,0")
    assert gib_of("auto") == [("cuda:0", 48)]


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda", "cuda:3"])
def test_ram_where_there_is_no_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(has_driver=False))
    (memory,) = measure_all(device)
    assert memory.device == "cpu"
    assert memory.free_bytes == memory.total_bytes - memory.used_bytes > 0


def test_a_number_beyond_the_last_gpu_is_ram(nvml: FakeNvml) -> None:
    assert gib_of("cuda:7")[0][0] == "cpu"


def test_what_processes_hold_themselves() -> None:
    before = process_memory_bytes([os.getpid()])
    held = bytearray(os.urandom(1) * (64 << 20))
    assert process_memory_bytes([os.getpid()]) - before > 48 << 20
    assert process_memory_bytes([2**22 + 1]) == 0, "no such process"
    assert len(held) == 64 << 20

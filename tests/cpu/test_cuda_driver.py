"""The driver's calls: their arguments and what becomes of a refusal, with functions in place of the library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.api.errors import InsufficientMemory
from engine.runner import cuda_driver
from engine.runner.cuda_driver import CudaDriver, CudaDriverError, DeviceLost, cuda_driver_for

GRANULE = 2 << 20
OUT_OF_MEMORY, INVALID_VALUE = 2, 1


class Library:
    """Notes every call; `refusals` maps a name to the status that it returns."""

    def __init__(self) -> None:
        self.refusals: dict[str, int] = {}
        self.made: list[tuple[str, tuple[Any, ...]]] = []

    def calls(self) -> dict[str, Callable[..., int]]:
        return {name: self._call(name) for name in cuda_driver._SIGNATURES}

    def names(self) -> list[str]:
        return [name for name, _ in self.made]

    def _call(self, name: str) -> Callable[..., int]:
        answers = {"cuMemGetAllocationGranularity": GRANULE, "cuMemCreate": 77, "cuMemAddressReserve": 1 << 40}

        def call(*arguments: Any) -> int:
            plain = tuple(getattr(argument, "value", argument) for argument in arguments)
            self.made.append((name, plain))
            if name == "cuGetErrorString":
                ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_char_p))[0] = b"some reason"
            elif name in answers:
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_uint64))[0] = answers[name]
            return self.refusals.get(name, 0)

        return call


def opened() -> tuple[Library, CudaDriver]:
    library = Library()
    driver = CudaDriver(library.calls(), 3)
    library.made.clear()
    return library, driver


def test_structs_have_the_sizes_of_the_header() -> None:
    assert ctypes.sizeof(cuda_driver._Allocation) == 32
    assert ctypes.sizeof(cuda_driver._Access) == 12


def test_memory_is_created_mapped_and_left_to_its_mapping() -> None:
    library, driver = opened()
    assert driver.granule_bytes == GRANULE
    assert driver.reserve(8 * GRANULE) == 1 << 40
    driver.map_new(1 << 40, GRANULE)
    driver.allow_access(1 << 40, GRANULE)
    driver.unmap(1 << 40, GRANULE)
    driver.free(1 << 40, 8 * GRANULE)
    assert library.names() == [
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemRelease",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemAddressFree",
    ]
    assert library.made[2][1] == (1 << 40, GRANULE, 0, 77, 0)
    assert library.made[3][1] == (77,)


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap"])
def test_a_device_without_room_is_said_in_a_sentence_and_keeps_nothing(name: str) -> None:
    library, driver = opened()
    library.refusals[name] = OUT_OF_MEMORY
    with pytest.raises(InsufficientMemory, match="no device memory left for 6 MiB more"):
        driver.map_new(1 << 40, 3 * GRANULE)
    assert ("cuMemRelease" in library.names()) == (name == "cuMemMap")


def test_a_refusal_for_another_reason_names_the_call_and_the_reason() -> None:
    library, driver = opened()
    library.refusals["cuMemMap"] = INVALID_VALUE
    with pytest.raises(CudaDriverError, match=r"cuMemMap \(some reason\)"):
        driver.map_new(1 << 40, GRANULE)
    assert library.names()[-1] == "cuMemRelease"


@pytest.mark.parametrize(
    ("name", "give_back"),
    [
        ("cuMemUnmap", lambda driver: driver.unmap(1 << 40, GRANULE)),
        ("cuMemAddressFree", lambda driver: driver.free(1 << 40, GRANULE)),
        ("cuMemHostUnregister", lambda driver: driver.unpin(4096)),
        ("cuCtxSynchronize", lambda driver: driver.synchronize()),
    ],
)
def test_what_cannot_be_given_back_is_no_refusal(name: str, give_back: Callable[[CudaDriver], None]) -> None:
    """A worker says of a refusal that nothing changed."""
    library, driver = opened()
    library.refusals[name] = OUT_OF_MEMORY
    with pytest.raises(DeviceLost, match=rf"{name} \(some reason\)"):
        give_back(driver)


def test_calls_that_need_a_context_enter_it_on_any_thread() -> None:
    library, driver = opened()
    driver.pin(4096, GRANULE)
    driver.unpin(4096)
    driver.synchronize()
    driver.free_bytes()
    assert library.names()[::2] == ["cuCtxSetCurrent"] * 4


def test_there_is_no_driver_without_a_gpu() -> None:
    assert cuda_driver_for(torch.device("cpu")) is None

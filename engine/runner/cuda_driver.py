"""The few calls of NVIDIA's driver that map device memory under chosen addresses, by ctypes; nothing is compiled.

torch's allocator gives memory and address together.  Here an address range is reserved for good, and physical
memory comes and goes beneath it, so that kernels and captured graphs keep their pointers.  Constants and structs
are those of the driver's documentation ("Virtual Memory Management").  Used through `engine.runner.device_arena`,
whose `MemoryDriver` this is; knows nothing of what lies in the memory.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Any

import torch

from engine.api.errors import EngineError, InsufficientMemory

log = logging.getLogger(__name__)

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

_OUT_OF_MEMORY = 2
_MAPS_MEMORY_ATTRIBUTE = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_PINNED_MEMORY = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_LEAST_GRANULARITY = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM


class _Location(Structure):
    """CUmemLocation"""

    _fields_ = (("kind", c_int), ("device", c_int))


class _AllocationFlags(Structure):
    """The flags inside CUmemAllocationProp."""

    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class _Allocation(Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("kind", c_int),
        ("shared_as", c_int),
        ("location", _Location),
        ("windows_metadata", c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", _Location), ("flags", c_int))


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Allocation), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Allocation), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
}


class CudaDriverError(EngineError):
    """The driver would not give something, for another reason than memory."""


class DeviceLost(Exception):
    """The driver would not take something back, or not finish: nothing on the GPU can be relied on any more."""


class CudaDriver:
    """`MemoryDriver` of one GPU; any thread may use it.  Build it with `cuda_driver_for`."""

    def __init__(self, calls: dict[str, Callable[..., int]], number: int) -> None:
        self._calls = calls
        self._device = torch.device("cuda", number)
        self._allocation = _Allocation(kind=_PINNED_MEMORY, location=_Location(_ON_DEVICE, number))
        self._access = _Access(self._allocation.location, _READ_AND_WRITE)
        # The context that torch works in; kept, as torch keeps it, until the process ends.
        self._context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), number)
        granularity = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(granularity), byref(self._allocation), _LEAST_GRANULARITY)
        self.granule_bytes = granularity.value

    def reserve(self, num_bytes: int) -> int:
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), num_bytes, 0, 0, 0)
        return address.value

    def free(self, address: int, num_bytes: int) -> None:
        self._must("cuMemAddressFree", address, num_bytes)

    def map_new(self, address: int, num_bytes: int) -> None:
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), num_bytes, byref(self._allocation), 0, wanted_bytes=num_bytes)
        try:
            self._call("cuMemMap", address, num_bytes, 0, handle, 0, wanted_bytes=num_bytes)
        finally:
            # The mapping alone keeps the memory from here on.
            self._must("cuMemRelease", handle)

    def allow_access(self, address: int, num_bytes: int) -> None:
        self._call("cuMemSetAccess", address, num_bytes, byref(self._access), 1, wanted_bytes=num_bytes)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._must("cuMemUnmap", address, num_bytes)

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self._enter()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def synchronize(self) -> None:
        self._enter()
        self._must("cuCtxSynchronize")

    def pin(self, address: int, num_bytes: int) -> None:
        self._enter()
        self._call("cuMemHostRegister_v2", address, num_bytes, 0, wanted_bytes=num_bytes, of_what="RAM to pin")

    def unpin(self, address: int) -> None:
        self._enter()
        self._must("cuMemHostUnregister", address)

    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        return torch.as_tensor(_DeviceBytes(address, num_bytes, owner), device=self._device)

    def _enter(self) -> None:
        """A thread that has not used this GPU yet has no context for calls that need one."""
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any, wanted_bytes: int = 0, of_what: str = "device memory") -> None:
        status = self._calls[name](*arguments)
        if status == _OUT_OF_MEMORY:
            raise InsufficientMemory(
                f"There is no {of_what} left for {wanted_bytes / 2**20:,.0f} MiB more; "
                "stop other programs that use it, or give models smaller shares."
            )
        if status:
            raise CudaDriverError(f"The NVIDIA driver refused {self._refused(name, status)}; load the model again.")

    def _must(self, name: str, *arguments: Any) -> None:
        if status := self._calls[name](*arguments):
            raise DeviceLost(f"the NVIDIA driver refused {self._refused(name, status)}")

    def _refused(self, name: str, status: int) -> str:
        return f"{name} ({_describe(self._calls, status)})"


class _DeviceBytes:
    """An address range as torch takes it over; torch keeps this, and with it `owner`, while a tensor lives."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def cuda_driver_for(device: torch.device) -> CudaDriver | None:
    """The driver of a GPU; None, with a line in the log, where it cannot map memory under chosen addresses."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)  # makes torch's context
    reason = "it is too old"
    try:
        library = ctypes.CDLL(_LIBRARY)
        calls = {name: _declared(library, name, signature) for name, signature in _SIGNATURES.items()}
    except (OSError, AttributeError) as error:
        reason = str(error)
    else:
        number, maps_memory = c_int(), c_int()
        failed = (
            calls["cuInit"](0)
            or calls["cuDeviceGet"](byref(number), device.index or 0)
            or calls["cuDeviceGetAttribute"](byref(maps_memory), _MAPS_MEMORY_ATTRIBUTE, number)
        )
        if not failed and maps_memory.value:
            return CudaDriver(calls, number.value)
        if failed:
            reason = _describe(calls, failed)
    log.warning("The NVIDIA driver does not map memory under fixed addresses (%s): sizes stay as they are", reason)
    return None


def _declared(library: ctypes.CDLL, name: str, signature: tuple[Any, ...]) -> Callable[..., int]:
    function = getattr(library, name)
    function.argtypes = signature
    function.restype = c_int
    return function  # type: ignore[no-any-return]


def _describe(calls: dict[str, Callable[..., int]], status: int) -> str:
    text = c_char_p()
    calls["cuGetErrorString"](status, byref(text))
    return text.value.decode() if text.value else f"error {status}"

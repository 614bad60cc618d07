"""Measures the memory of this machine's devices: NVML for NVIDIA GPUs, `engine.host_memory` for RAM.

Imports no torch: the daemon must know how much there is before a worker exists.  The
arithmetic on the figures is in `app.residency.arithmetic.memory`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import psutil

from app.residency.arithmetic.memory import DeviceMemory
from engine.host_memory import host_memory


def measure(device: str) -> DeviceMemory:
    """Memory of the device that the engine takes for `device` ("auto", "cpu", "cuda", "cuda:1")."""
    return measure_all(device)[0]


def measure_all(device: str) -> tuple[DeviceMemory, ...]:
    """Memory of each device that models may run on where the setting is `device`: never none.

    "auto" and "cuda" are all GPUs in CUDA's order, "cuda:1" is one of them, "cpu" is RAM; so is what names a GPU on
    a machine that has none.
    """
    if device == "cpu":
        return (_measure_ram(),)
    ordinal = device.partition(":")[2]
    gpus = _measure_gpus(int(ordinal) if ordinal.isdigit() else None)
    return gpus or (_measure_ram(),)


def process_memory_bytes(pids: Iterable[int]) -> int:
    """RAM that these processes hold for themselves; pages of files, which the system can drop, are left out.

    A process that is gone, or is not ours to look at, holds nothing.
    """
    total = 0
    for pid in pids:
        try:
            memory = psutil.Process(pid).memory_info()
        except psutil.Error:
            continue
        total += max(0, int(memory.rss) - int(getattr(memory, "shared", 0)))
    return total


def _measure_gpus(ordinal: int | None) -> tuple[DeviceMemory, ...]:
    """The GPUs that CUDA sees in this environment, or the one it numbers `ordinal`; none without a driver or NVML."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        found = []
        for number in range(pynvml.nvmlDeviceGetCount()) if ordinal is None else (ordinal,):
            handle = _visible_gpu(pynvml, number)
            if handle is None:
                break  # CUDA, too, stops at the first name that is no GPU
            info = pynvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(DeviceMemory(f"cuda:{number}", int(info.total), int(info.used)))
        return tuple(found)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _visible_gpu(pynvml: ModuleType, ordinal: int) -> Any:
    """NVML counts all GPUs; CUDA only those of CUDA_VISIBLE_DEVICES, in that order."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return pynvml.nvmlDeviceGetHandleByIndex(ordinal) if ordinal < pynvml.nvmlDeviceGetCount() else None
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if ordinal >= len(names) or names[ordinal] == "-1":
        return None
    name = names[ordinal]
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)


def _measure_ram() -> DeviceMemory:
    """RAM of this machine or, where that is less, of this container."""
    total, used = host_memory()
    return DeviceMemory("cpu", total, used)

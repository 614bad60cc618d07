"""Measures the memory of this machine's devices: NVML for NVIDIA GPUs, psutil and cgroups for RAM.

Imports no torch: the daemon must know how much there is before a worker exists.  The
arithmetic on the figures is in `app.residency.memory`.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from app.residency.memory import DeviceMemory

_CGROUP_LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")
_CGROUP_USAGE_FILES = ("memory.current", "memory/memory.usage_in_bytes")
_CGROUP_STAT_FILES = ("memory.stat", "memory/memory.stat")
_FILE_CACHE_KEYS = frozenset({"inactive_file", "active_file"})


def measure(device: str) -> DeviceMemory:
    """Memory of the device that the engine takes for `device` ("auto", "cpu", "cuda", "cuda:1")."""
    if device != "cpu":
        gpu = _measure_gpu(int(device.partition(":")[2] or 0))
        if gpu is not None:
            return gpu
    return _measure_ram()


def _measure_gpu(ordinal: int) -> DeviceMemory | None:
    """The GPU that CUDA numbers `ordinal` in this environment; None without a driver, NVML or such a GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = _visible_gpu(pynvml, ordinal)
        if handle is None:
            return None
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return DeviceMemory(f"cuda:{ordinal}", int(info.total), int(info.used))
    except pynvml.NVMLError:
        return None
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
    memory = psutil.virtual_memory()
    total, used = int(memory.total), int(memory.total - memory.available)
    container = container_memory(Path("/sys/fs/cgroup"))
    if container is not None and container[0] < total:
        total, used = container
    return DeviceMemory("cpu", total, used)


def container_memory(cgroup: Path) -> tuple[int, int] | None:
    """Limit and use of the control group in bytes; None where there is no limit.

    File pages are left out of the use: the kernel gives them back under pressure, and
    reading the weights alone would otherwise look like a full machine.
    """
    limit = _read_first(cgroup, _CGROUP_LIMIT_FILES)
    usage = _read_first(cgroup, _CGROUP_USAGE_FILES)
    if not limit.isdigit() or not usage.isdigit():
        return None
    pairs = (line.split() for line in _read_first(cgroup, _CGROUP_STAT_FILES).splitlines())
    file_bytes = sum(int(value) for key, value in pairs if key in _FILE_CACHE_KEYS)
    return int(limit), max(0, int(usage) - file_bytes)


def _read_first(cgroup: Path, names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return (cgroup / name).read_text().strip()
        except OSError:
            continue
    return ""

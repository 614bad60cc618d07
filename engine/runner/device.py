"""Resolves "auto" device, dtype and thread count for this machine, and measures its memory.

Called when an engine is built.  What follows from the figures is in `engine.runner.memory`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

from engine.api.config import EngineConfig
from engine.api.errors import InvalidParameter
from engine.runner.memory import MIB, absolute_budget_bytes, choose_outside_bytes

REACHABLE_MARGIN_BYTES = 256 * MIB
"""Left alone of the free memory, for what other programs and the driver take before the cache is allocated."""

_PROCESS_BYTES_GUESS = 200 * MIB
"""What Python and the libraries hold where the system does not tell."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """The device to run on; raises `InvalidParameter` when the one asked for is not there."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidParameter("device", f"{name!r} is not a device; use auto, cpu or cuda.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter("device", "No NVIDIA GPU is visible; use --device cpu, or check nvidia-smi.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidParameter("device", f"There are {torch.cuda.device_count()} NVIDIA GPUs here, and no {name}.")
    return torch.device("cuda:0") if name == "cuda" else device


def resolve_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """The compute dtype: the checkpoint's own on a GPU, float32 on a CPU, where narrow floats are emulated."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    dtype = _DTYPES.get(checkpoint_dtype, torch.bfloat16)
    return torch.bfloat16 if dtype == torch.float32 else dtype


def total_memory_bytes(device: torch.device) -> int:
    """All memory of the device, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    import psutil

    return int(psutil.virtual_memory().total)


def own_memory_bytes() -> int:
    """What this process holds of the machine's memory, files that it maps not counted."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return _PROCESS_BYTES_GUESS
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else _PROCESS_BYTES_GUESS


def memory_budget_bytes(config: EngineConfig, device: torch.device) -> int:
    """What this engine may use: the absolute budget it was given, else its share of the device."""
    return absolute_budget_bytes(total_memory_bytes(device), config.gpu_memory_utilization, config.memory_budget_bytes)


def device_memory_in_use(device: torch.device) -> int | None:
    """What all processes hold of a GPU; None where NVML does not tell.

    Asks NVML and not CUDA, which would create this process's context and so spoil the figure that
    `measure_outside_bytes` compares with.
    """
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        return int(torch.cuda.device_memory_used(device))
    except (pynvml.NVMLError, RuntimeError):
        return None


def measure_outside_bytes(device: torch.device, in_use_before: int | None = None, *, mapped_bytes: int = 0) -> int:
    """What the CUDA context and libraries of this process hold beside torch's allocator and what is mapped.

    `mapped_bytes` is what arenas hold (`engine.runner.device_arena`).  `in_use_before` is `device_memory_in_use`
    from before the process first touched the device; it serves where the driver does not tell processes apart.
    Never fails: the last resort is a constant.
    """
    if device.type != "cuda":
        return 0
    in_use = device_memory_in_use(device)
    growth_bytes = in_use - in_use_before if in_use is not None and in_use_before is not None else None
    own_bytes = torch.cuda.memory_reserved(device) + mapped_bytes
    return choose_outside_bytes(own_bytes, _process_memory_bytes(device), growth_bytes)


def reachable_memory_bytes(device: torch.device, outside_bytes: int, mapped_bytes: int = 0) -> int | None:
    """What this process could hold of a GPU now: what it holds already and what is free, less a margin.

    `outside_bytes` is from `measure_outside_bytes`, `mapped_bytes` as there.  None on a CPU, whose free memory is the
    system's to judge.
    """
    if device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device)
    own_bytes = torch.cuda.memory_reserved(device) + mapped_bytes + outside_bytes
    return int(free_bytes) + own_bytes - REACHABLE_MARGIN_BYTES


def held_memory_bytes(device: torch.device, outside_bytes: int, mapped_bytes: int) -> int:
    """What this process holds of a GPU now: as the driver books it, else the sum of what is known.

    `outside_bytes` is from `measure_outside_bytes`, `mapped_bytes` as there.
    """
    known_bytes = torch.cuda.memory_reserved(device) + mapped_bytes
    booked_bytes = _process_memory_bytes(device)
    return known_bytes + choose_outside_bytes(known_bytes, booked_bytes, known_bytes + outside_bytes)


def workspace_peak_bytes(device: torch.device, run_largest_step: Callable[[], None]) -> int:
    """Run a step and return the most that torch's allocator held for it beyond what is allocated now.

    Counted in what the allocator reserved, so that rounding and fragmentation are part of it.  The
    reserve is given back before and after.  Only for GPUs.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    allocated_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    peak_bytes = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return max(0, peak_bytes - allocated_bytes)


def _process_memory_bytes(device: torch.device) -> int | None:
    """What the driver books on this process; None where it does not tell, as in many containers."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)

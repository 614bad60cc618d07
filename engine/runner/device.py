"""Resolves "auto" device, dtype and thread count for this machine, and reports its memory.

Called by `engine.loop` when an engine is built.
"""

from __future__ import annotations

import os

import psutil
import torch

from engine.api.config import EngineConfig
from engine.api.errors import InvalidParameter

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """The device to run on; raises `InvalidParameter` when the one asked for is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidParameter("device", f"{name!r} is not a device; use auto, cpu or cuda.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter("device", "No NVIDIA GPU is visible; use --device cpu, or check nvidia-smi.")
    return device


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
    return int(psutil.virtual_memory().total)


def memory_budget_bytes(config: EngineConfig, device: torch.device) -> int:
    """What this engine may use: the absolute budget it was given, else its share of the device."""
    if config.memory_budget_bytes is not None:
        return config.memory_budget_bytes
    return int(total_memory_bytes(device) * config.gpu_memory_utilization)


def available_threads() -> int:
    """CPUs this process may run on, which in a container is fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

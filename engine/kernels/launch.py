"""Programmatic dependent launch: a kernel is placed while the one before it still runs.

On Hopper and later a kernel launched this way starts early, loads what does not depend on its
predecessor (weights), and waits with `gdc_wait` before it touches the rest.  That hides the few
microseconds between two small kernels, of which a decode step has hundreds (CUDA C++ Programming
Guide, "Programmatic Dependent Launch and Synchronization").

The rules that every such kernel keeps: each of its programs waits before it reads what an earlier kernel
wrote and before it writes anything, those that leave early too; so when it has ended, all before it have.
What it loads before it waits was written before the last ordinary launch.  Called by the kernels' wrappers.
"""

from __future__ import annotations

from functools import cache

import torch

_FIRST_CAPABILITY = (9, 0)


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` may use the `gdc_*` instructions."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch keywords for a kernel that calls `gdc_wait`; empty where there is no such thing."""
    return {"launch_pdl": True} if supports_pdl(device) else {}


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Shared memory of a multiprocessor, nearly all of which one program may use: 228 KiB on Hopper, 100 on Ada.

    The CPU, where kernels run in Triton's interpreter, has no bound and counts as Hopper.
    """
    if device.type != "cuda":
        return 228 * 1024
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the device; 4 for the CPU, where kernels run in Triton's interpreter."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

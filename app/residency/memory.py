"""Arithmetic of device memory: who holds what, what a worker may take.  No I/O, no state.

All sizes are in bytes.  Called by `app.residency.supervisor`; the figures come from
`app.residency.devices` and from what resident workers declared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.api.config import Quantization
from engine.api.wire import WorkerFacts
from store.facts import ModelFacts

SMALLEST_DTYPE_BYTES = 2
MINIMUM_WORKING_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device at this moment; `used_bytes` counts every process."""

    device: str
    total_bytes: int
    used_bytes: int


def declared_bytes(facts: WorkerFacts) -> int:
    """What a resident worker holds for good: its weights and its whole KV pool, touched or not."""
    return facts.weight_bytes + facts.num_kv_tokens * facts.kv_bytes_per_token


def worker_budget_bytes(memory: DeviceMemory, utilization: float, declared: Iterable[int]) -> int:
    """What a new worker may take: its share of the total less what others hold; may be negative.

    Our own workers hold what they declared even where the system does not show it yet, and
    other programs hold what is in use beyond that.
    """
    held = max(memory.used_bytes, sum(declared))
    return int(memory.total_bytes * utilization) - held


def least_needed_bytes(facts: ModelFacts, device: str, quantization: Quantization) -> int:
    """A lower bound of what the model takes; the worker itself knows the true figure after loading."""
    return least_weight_bytes(facts, device, quantization) + MINIMUM_WORKING_BYTES


def least_weight_bytes(facts: ModelFacts, device: str, quantization: Quantization) -> int:
    """A lower bound of what the weights take once they are loaded.

    A GPU has every weight in half precision, however it is stored.  On the CPU weights stay as they are stored,
    unless floats are made 8-bit numbers.
    """
    if device.startswith("cuda"):
        return SMALLEST_DTYPE_BYTES * facts.num_parameters
    if quantization == "int8":
        return min(facts.weight_bytes, facts.num_parameters)
    if quantization == "none":
        return max(facts.weight_bytes, SMALLEST_DTYPE_BYTES * facts.num_parameters)
    return facts.weight_bytes

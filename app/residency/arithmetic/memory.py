"""Arithmetic of device memory: what weights, caches and steps take there.  No I/O, no state.

All sizes are in bytes.  Called by `app.residency.arithmetic.demand` and `app.residency.advice.acceptance`; what devices
have comes from `app.residency.devices`.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.residency.arithmetic.tenants import DeviceShare
from engine.api.architectures import ENCODER_TYPES
from engine.api.config import Quantization
from store.facts import ModelFacts

SMALLEST_DTYPE_BYTES = 2
_FLOAT32_BYTES = 4

_FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16", "random", "unknown"})


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device at this moment; `used_bytes` counts every process."""

    device: str
    total_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return max(0, self.total_bytes - self.used_bytes)


def least_weight_bytes(facts: ModelFacts, device: str, quantization: Quantization) -> int:
    """A lower bound of what the weights take once they are loaded.

    A GPU has every weight in half precision, however it is stored.  On the CPU weights stay as they are stored,
    unless floats are made 8-bit numbers; an encoder's are float32.
    """
    if device.startswith("cuda"):
        return SMALLEST_DTYPE_BYTES * facts.num_parameters
    if is_encoder(facts):
        return max(facts.weight_bytes, _FLOAT32_BYTES * facts.num_parameters)
    if quantization == "int8":
        return min(facts.weight_bytes, facts.num_parameters)
    if quantization == "none":
        return max(facts.weight_bytes, SMALLEST_DTYPE_BYTES * facts.num_parameters)
    return facts.weight_bytes


def cache_bytes_per_token(facts: ModelFacts, device: str, quantization: Quantization = "auto") -> int | None:
    """What a token takes in the KV cache that the engine makes on a device; None for models without one.

    In RAM keys and values of float checkpoints are float32, as the arithmetic is; beside quantised weights, and on
    a GPU, they take half precision.
    """
    if facts.kv_bytes_per_token is None:
        return None
    half = facts.kv_bytes_per_token // (2 if facts.dtype == "float32" else 1)
    is_exact = not is_gpu(device) and quantization != "int8" and facts.quantization in _FLOAT_TYPES
    return 2 * half if is_exact else half


def is_encoder(facts: ModelFacts) -> bool:
    """Whether a model reads a whole text at once, without a cache."""
    return facts.architecture in ENCODER_TYPES


def is_gpu(device: str) -> bool:
    return device.startswith("cuda")


def device_share(memory: DeviceMemory, limit: float, own_bytes: int) -> DeviceShare:
    """The device as the daemon may use it; `own_bytes` of what is in use at this moment is held by its workers."""
    return DeviceShare(memory.device, memory.total_bytes, max(0, memory.used_bytes - own_bytes), limit)

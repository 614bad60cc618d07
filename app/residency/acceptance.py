"""Whether a model is worth its download: can the engine run it, and can this machine hold it?

Arithmetic on facts that were read before any weights are here; no I/O, no state.  Called by the daemon when
it pulls a model, and by `quire show`.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.residency.memory import MINIMUM_WORKING_BYTES, DeviceMemory, least_weight_bytes
from app.settings import Settings
from engine.api.architectures import (
    unsupported_activation,
    unsupported_architecture,
    unsupported_experts,
    unsupported_labels,
    unsupported_quantization,
    unsupported_types,
    unsupported_window,
)
from engine.api.config import Quantization
from store.errors import TooLargeForDevice, UnsupportedFormat
from store.facts import ModelFacts
from store.space import format_bytes


@dataclass(frozen=True, slots=True)
class Host:
    """The device that models run on; `utilization` is the share of it that the daemon may take."""

    memory: DeviceMemory
    utilization: float
    quantization: Quantization = "auto"
    max_model_len: int | None = None

    @property
    def usable_bytes(self) -> int:
        return int(self.memory.total_bytes * self.utilization)


def host_of(settings: Settings, memory: DeviceMemory) -> Host:
    """The device as the daemon's settings let it be used."""
    return Host(memory, settings.memory_limit, settings.quantization, settings.max_model_len)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes; `cache_bytes` is for one conversation that fills the context, 0 where that is not known.

    The total has the least that any step works in besides.
    """

    weight_bytes: int
    cache_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + MINIMUM_WORKING_BYTES + self.cache_bytes


def accept(facts: ModelFacts, host: Host) -> str | None:
    """None if the model fits with its whole context, else a sentence about what it will have to do without.

    Raises `UnsupportedFormat` for a model that the engine cannot run, `TooLargeForDevice` for one whose weights
    alone are more than the device has.
    """
    if reason := why_unsupported(facts):
        raise UnsupportedFormat(reason)
    need = memory_need(facts, host)
    has = f"{host.memory.device} has {format_bytes(host.memory.total_bytes)}"
    if need.weight_bytes > host.memory.total_bytes:
        raise TooLargeForDevice(
            f"The weights alone take {format_bytes(need.weight_bytes)} and {has}; choose a smaller model, or "
            "download it all the same with `quire pull --force`."
        )
    if need.weight_bytes > host.usable_bytes:
        return (
            f"The weights take {format_bytes(need.weight_bytes)}, more than the share of {host.utilization:g} that the "
            f"daemon may take of {host.memory.device}; raise memory_limit to run this model."
        )
    if need.total_bytes <= host.usable_bytes:
        return None
    return (
        f"The whole context needs about {format_bytes(need.total_bytes)} and {has}; the model will run with a context "
        f"of about {shortened_context(facts, host) // 100 * 100:,} tokens."
    )


def why_unsupported(facts: ModelFacts) -> str | None:
    """The first reason why the engine cannot run the model."""
    reasons = (
        unsupported_architecture(
            facts.architecture,
            facts.classes,
            is_gguf=facts.format == "gguf",
            has_own_code=facts.has_own_code,
        ),
        unsupported_labels(facts.num_labels),
        unsupported_quantization(is_quantized=facts.quantization_method is not None),
        unsupported_experts(facts.num_experts),
        unsupported_activation(facts.activation, facts.architecture) if facts.activation else None,
        unsupported_window(has_sliding_window=facts.has_sliding_window),
        unsupported_types(facts.tensor_types, is_gguf=facts.format == "gguf"),
    )
    return next(filter(None, reasons), None)


def memory_need(facts: ModelFacts, host: Host) -> MemoryNeed:
    """What the weights take on the device at least, and a conversation of full length beside them."""
    context = _context(facts, host)
    return MemoryNeed(
        weight_bytes=least_weight_bytes(facts, host.memory.device, host.quantization),
        cache_bytes=(facts.kv_bytes_per_token or 0) * context,
    )


def shortened_context(facts: ModelFacts, host: Host) -> int:
    """Tokens of context for which there is memory beside the weights, up to the model's own."""
    need, context = memory_need(facts, host), _context(facts, host)
    if not facts.kv_bytes_per_token:
        return context
    left_bytes = host.usable_bytes - (need.total_bytes - need.cache_bytes)
    return max(0, min(context, left_bytes // facts.kv_bytes_per_token))


def _context(facts: ModelFacts, host: Host) -> int:
    lengths = [length for length in (facts.context_length, host.max_model_len) if length]
    return min(lengths, default=0)

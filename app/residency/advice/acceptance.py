"""Whether a model is worth its download: can the engine run it, and can this machine hold it?

Arithmetic on facts that were read before any weights are here; no I/O, no state.  Called by the daemon when
it pulls a model, and by `quire show`.
"""

from __future__ import annotations

from app.residency.arithmetic.footprint import BLOCK_SIZE, Host, footprint
from app.residency.arithmetic.memory import DeviceMemory
from app.residency.words import memory_name
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
from store.errors import TooLargeForDevice, UnsupportedFormat
from store.facts import ModelFacts
from store.space import format_bytes


def host_of(settings: Settings, memory: DeviceMemory) -> Host:
    """The device as the daemon's settings let it be used."""
    return Host(memory, settings.memory_limit, settings.quantization, settings.max_model_len, settings.max_num_seqs)


def accept(facts: ModelFacts, host: Host) -> str | None:
    """None if the model fits with its whole context, else a sentence about what it will have to do without.

    Raises `UnsupportedFormat` for a model that the engine cannot run, `TooLargeForDevice` for one whose weights
    alone are more than the device has.
    """
    if reason := why_unsupported(facts):
        raise UnsupportedFormat(reason)
    need = footprint(facts, host)
    needed_bytes = need.total_bytes(need.context)
    has = f"{host.memory.device} has {format_bytes(host.memory.total_bytes)}"
    if need.weight_bytes > host.memory.total_bytes:
        raise TooLargeForDevice(
            f"The weights alone take {format_bytes(need.weight_bytes)} and {has}; choose a smaller model, or "
            "download it all the same with `quire pull --force`."
        )
    if need.weight_bytes > host.usable_bytes:
        return (
            f"The weights take {format_bytes(need.weight_bytes)}, more than the share of {host.utilization:g} that the "
            f"daemon may take of {memory_name(host.memory.device)}; raise memory_limit to run this model."
        )
    if needed_bytes <= host.usable_bytes:
        return None
    context = need.context_within(host.usable_bytes) // 100 * 100
    if not context:
        return (
            f"The model needs about {format_bytes(need.total_bytes(BLOCK_SIZE))} and {has}, of which the daemon may "
            f"take {host.utilization:g}; it may not start, so choose a smaller model."
        )
    return (
        f"The whole context needs about {format_bytes(needed_bytes)} and {has}; the model will run with a context "
        f"of about {context:,} tokens."
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

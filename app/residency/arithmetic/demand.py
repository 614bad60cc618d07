"""`demand`: what a model will take of a device, before it is there.

Weights, workspace, and a KV cache for the conversations that are known of its traffic.  Pure arithmetic on facts
and on recorded lengths; the worker itself measures the true figures after loading.  Called by
`app.residency.need_reader` before a model is placed, and by `quire plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.residency.arithmetic.footprint import CPU_MAX_CACHE_BYTES, Footprint, Host, footprint
from app.residency.arithmetic.memory import DeviceMemory
from app.residency.arithmetic.tenants import DeviceShare, Need
from engine.api.config import Quantization
from store.facts import ModelFacts

USUAL_CONVERSATION_TOKENS = 8192
USUAL_CONCURRENCY = 4
"""What is assumed of a model nobody has used yet."""

ENOUGH_REQUESTS = 20
"""Lengths of fewer requests say little."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What was recorded of a model's requests: the P99 of the prompts and the longest answer, in tokens.

    `peak_concurrency` is how many were open at once at most; None where nobody counted.
    """

    num_requests: int
    prompt_p99: int
    output_max: int
    peak_concurrency: int | None = None

    @property
    def conversation_tokens(self) -> int:
        return self.prompt_p99 + self.output_max


def demand(
    facts: ModelFacts,
    device: DeviceShare,
    *,
    quantization: Quantization = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    traffic: Traffic | None = None,
) -> Need:
    """What a model without a share of its own takes of a device."""
    memory = DeviceMemory(device.name, device.total_bytes, 0)
    host = Host(memory, device.limit, quantization, max_model_len, max_num_seqs)
    return need_of(footprint(facts, host), traffic, is_gpu=host.is_gpu)


def need_of(model: Footprint, traffic: Traffic | None = None, *, is_gpu: bool = True) -> Need:
    """The need that goes with a footprint.

    Least: one usual conversation.  Wanted: as many of those at once as were seen, and one that fills the whole
    context.  Most: as many of those as the engine runs at once.
    """
    if not model.kv_bytes_per_token or not model.context:
        return Need(model.fixed_bytes, 0, 0, 0, certain_bytes=model.weight_bytes)
    known = traffic if traffic is not None and traffic.num_requests >= ENOUGH_REQUESTS else None
    usual = known.conversation_tokens if known else USUAL_CONVERSATION_TOKENS
    concurrency = min((known.peak_concurrency if known else None) or USUAL_CONCURRENCY, model.num_sequences)
    least = model.kv_bytes(min(usual, model.context))
    whole = model.kv_bytes(model.context)
    wanted = max(concurrency * least, whole)
    if not is_gpu:
        wanted = max(least, min(wanted, CPU_MAX_CACHE_BYTES))
    most = max(wanted, model.num_sequences * whole)
    return Need(model.fixed_bytes, least, wanted, most, certain_bytes=model.weight_bytes + model.kv_bytes(1))

"""`demand`: what a model will take of a device, before it is there.

Weights, workspace, and a KV cache for the conversations that are known of its traffic.  Pure arithmetic on facts
and on recorded lengths; the worker itself measures the true figures after loading.  Called by
`app.residency.supervisor` before it places a model, and by `quire plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.residency.memory import (
    CPU_MAX_CACHE_BYTES,
    cache_bytes_per_token,
    default_num_sequences,
    is_gpu,
    least_weight_bytes,
    working_bytes,
)
from app.residency.tenants import DeviceShare, Need
from engine.api.config import Quantization
from store.facts import ModelFacts

USUAL_CONVERSATION_TOKENS = 8192
USUAL_CONCURRENCY = 4
"""What is assumed of a model nobody has used yet."""

ENOUGH_REQUESTS = 20
"""Lengths of fewer requests say little."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What was recorded of a model's requests: the P99 of the prompts and the longest answer, in tokens."""

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
    block_size: int = 16,
    traffic: Traffic | None = None,
) -> Need:
    """What a model without a share of its own takes.

    Least: one usual conversation.  Wanted: as many of those at once as were seen, and one that fills the whole
    context.  Most: as many of those as the engine runs at once.
    """
    sequences = max_num_seqs or default_num_sequences(device.name)
    weights = least_weight_bytes(facts, device.name, quantization)
    fixed = weights + working_bytes(device.name, sequences)
    context = whole_context(facts, max_model_len)
    per_token = cache_bytes_per_token(facts, device.name, quantization)
    if not per_token or not context:
        return Need(fixed, 0, 0, 0)
    known = traffic if traffic is not None and traffic.num_requests >= ENOUGH_REQUESTS else None
    usual = known.conversation_tokens if known else USUAL_CONVERSATION_TOKENS
    concurrency = min((known.peak_concurrency if known else None) or USUAL_CONCURRENCY, sequences)

    def kv_bytes(tokens: int) -> int:
        return -(-tokens // block_size) * block_size * per_token

    one = kv_bytes(min(usual, context))
    most = sequences * kv_bytes(context)
    if not is_gpu(device.name):
        most = min(most, max(one, CPU_MAX_CACHE_BYTES))
    return Need(fixed, one, min(most, max(concurrency * one, kv_bytes(context))), most)


def whole_context(facts: ModelFacts, max_model_len: int | None) -> int:
    """The longest context in tokens that the model may be served with; 0 where nobody says."""
    return min((length for length in (facts.context_length, max_model_len) if length), default=0)

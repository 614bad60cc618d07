"""`footprint`: what a model takes of a device, by its facts alone: weights, workspace, and each token of its cache.

The one place for these estimates; the worker measures the true figures after loading (`engine.sizing`, whose rules
these follow).  Pure arithmetic.  Called by `acceptance`, `recommend`, `demand` and `plan`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.residency.arithmetic.memory import DeviceMemory, cache_bytes_per_token, is_encoder, is_gpu, least_weight_bytes
from engine.api.config import Quantization
from engine.core.step_sizes import PROMPT_SIZES, decode_sizes
from store.facts import ModelFacts

MIB = 2**20
GIB = 2**30

CPU_MAX_CACHE_BYTES = 4 * GIB
"""A KV cache in RAM is made no larger than this at first."""

BLOCK_SIZE = 16

DEFAULT_GPU_SEQUENCES = 256
DEFAULT_CPU_SEQUENCES = 64
"""Sequences that the engine runs at once where nobody says."""

ROOMY_GPU_BYTES = 32 * GIB
ROOMY_GPU_STEP_TOKENS = 8192
GPU_STEP_TOKENS = 2048
CPU_STEP_TOKENS = 256
ENCODER_GPU_STEP_TOKENS = 16_384
ENCODER_CPU_STEP_TOKENS = 512
SMALLEST_STEP_TOKENS = 512
"""Tokens of a step; on a GPU fewer, down to the smallest, where there is no room for the workspace of more."""

LIBRARY_BYTES = 600 * MIB
"""CUDA's context, cuBLAS and loaded kernels."""
MOST_DRIVER_BYTES = 768 * MIB
DRIVER_PART = 32
"""What may be in use of a GPU that nobody uses, one part in so many of it at most; each worker counts it as its own."""
GRANULE_BYTES = 2 * MIB
"""What the driver gives memory in: each layer's keys and values may end in a granule that is not full."""
PROCESS_BYTES = 256 * MIB
"""Python, torch and compiled kernels of a worker in RAM; 160 to 220 MiB were measured."""
GRAPH_BYTES = 8 * MIB
"""What the driver keeps for one captured graph."""

_SAMPLING_COPIES = 3
"""Of a step's logits in float32: themselves, and two for filtering."""
_USUAL_VOCABULARY = 152_000
_USUAL_WIDENING = 3
_USUAL_LAYERS = 32
"""What is assumed where facts do not say, as those of the catalogue."""


@dataclass(frozen=True, slots=True)
class Host:
    """The device that models run on; `utilization` is the share of it that the daemon may take."""

    memory: DeviceMemory
    utilization: float
    quantization: Quantization = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None

    @property
    def usable_bytes(self) -> int:
        return int(self.memory.total_bytes * self.utilization)

    @property
    def is_gpu(self) -> bool:
        return is_gpu(self.memory.device)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that a worker takes besides weights and KV cache.

    `process`: the driver's share on a GPU, the process itself in RAM; `step`: activations and logits of the largest
    step, and the rows of all sequences; `graphs`: captured CUDA graphs; `rounding`: what a cache may take beyond its
    blocks.
    """

    process: int
    step: int
    graphs: int = 0
    rounding: int = 0

    @property
    def total_bytes(self) -> int:
        return self.process + self.step + self.graphs + self.rounding


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model takes: `context` is the longest it may be served with, in tokens, 0 where nobody says.

    `kv_bytes_per_token` is 0 for models without a cache, and for those whose facts do not tell.
    """

    weight_bytes: int
    workspace: Workspace
    kv_bytes_per_token: int
    context: int
    num_sequences: int

    @property
    def fixed_bytes(self) -> int:
        return self.weight_bytes + self.workspace.total_bytes

    def kv_bytes(self, num_tokens: int) -> int:
        """Of a conversation of so many tokens, in whole blocks."""
        return -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE * self.kv_bytes_per_token

    def total_bytes(self, num_tokens: int) -> int:
        return self.fixed_bytes + self.kv_bytes(num_tokens)

    def context_within(self, budget_bytes: int) -> int:
        """Tokens of one conversation for which a budget has room, up to the whole context."""
        if not self.kv_bytes_per_token:
            return self.context if self.fixed_bytes <= budget_bytes else 0
        blocks = max(0, budget_bytes - self.fixed_bytes) // (BLOCK_SIZE * self.kv_bytes_per_token)
        return min(self.context, blocks * BLOCK_SIZE)


def footprint(facts: ModelFacts, host: Host) -> Footprint:
    """With the largest steps that leave room for a conversation on the device, had the model it for itself."""
    device = host.memory.device
    sequences = host.max_num_seqs or (DEFAULT_GPU_SEQUENCES if host.is_gpu else DEFAULT_CPU_SEQUENCES)
    step_tokens = _step_tokens(host, reads_whole_texts=is_encoder(facts))
    context = min((length for length in (facts.context_length, host.max_model_len) if length), default=0)
    while True:
        found = Footprint(
            weight_bytes=least_weight_bytes(facts, device, host.quantization),
            workspace=_workspace(facts, host, context, sequences, step_tokens),
            kv_bytes_per_token=cache_bytes_per_token(facts, device, host.quantization) or 0,
            context=context,
            num_sequences=sequences,
        )
        if step_tokens <= SMALLEST_STEP_TOKENS or found.total_bytes(BLOCK_SIZE) <= host.usable_bytes:
            return found
        step_tokens //= 2


def _step_tokens(host: Host, *, reads_whole_texts: bool) -> int:
    """How many tokens the engine computes in a step at most, where there is room."""
    if reads_whole_texts:
        return ENCODER_GPU_STEP_TOKENS if host.is_gpu else ENCODER_CPU_STEP_TOKENS
    if not host.is_gpu:
        return CPU_STEP_TOKENS
    return ROOMY_GPU_STEP_TOKENS if host.memory.total_bytes >= ROOMY_GPU_BYTES else GPU_STEP_TOKENS


def _workspace(facts: ModelFacts, host: Host, context: int, sequences: int, step_tokens: int) -> Workspace:
    """By the widest layer of a model: the MLP's, two widths of it and the hidden states alive at a time."""
    hidden = facts.embedding_length or _likely_hidden(facts)
    intermediate = facts.intermediate_size or _USUAL_WIDENING * hidden
    vocabulary = facts.vocab_size or _USUAL_VOCABULARY
    generates = not is_encoder(facts)
    logits = sequences * vocabulary if generates else 0
    activation_bytes = 2 if host.is_gpu else 4
    step = activation_bytes * step_tokens * (2 * intermediate + 4 * hidden) + 4 * _SAMPLING_COPIES * logits
    if not host.is_gpu:
        return Workspace(PROCESS_BYTES, step)
    outside = LIBRARY_BYTES + min(MOST_DRIVER_BYTES, host.memory.total_bytes // DRIVER_PART)
    if not generates:
        return Workspace(outside, step)
    # Ids of a row's tokens and of its blocks.
    rows = 4 * sequences * (context + -(-context // BLOCK_SIZE))
    return Workspace(
        outside,
        step + rows,
        graphs=_graph_bytes(sequences, vocabulary, 3 * intermediate + 4 * hidden),
        rounding=2 * (facts.num_layers or _USUAL_LAYERS) * GRANULE_BYTES,
    )


def _graph_bytes(sequences: int, vocabulary: int, widths: int) -> int:
    """Each graph keeps its own logits, all of them together the activations of the largest."""
    sizes = decode_sizes(sequences)
    logits = (sum(sizes) + len(PROMPT_SIZES)) * vocabulary
    activations = max(*sizes, *PROMPT_SIZES) * widths
    return (len(sizes) + len(PROMPT_SIZES)) * GRAPH_BYTES + 2 * (logits + activations)


def _likely_hidden(facts: ModelFacts) -> int:
    """By the usual shape of a transformer, 12 x layers x hidden² weights (https://arxiv.org/abs/2001.08361 §2.1)."""
    return math.isqrt(facts.num_parameters // (12 * (facts.num_layers or _USUAL_LAYERS)))

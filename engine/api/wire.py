"""The frames between the daemon and a worker: msgpack over one local ZeroMQ PAIR socket.

One tagged union per direction.  The first frame to a worker is `Start`; it answers with
any number of `Progress`, then `Ready` or `Fatal`.  After `Ready`, `Steps` carries the
outputs of one engine step for all sequences together, and each `ResizeCache`, `Sleep` and
`Wake` is answered by one `Memory` or `Refused`, in order.  Used by `engine.worker` and
`app.residency.workers.worker_client`; nothing else knows the encoding.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.api.config import EngineConfig
from engine.api.output import StepOutput
from engine.api.request import Prompt

WIRE_VERSION = 2


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Load this model; a worker of another wire version answers `Fatal`."""

    wire_version: int
    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    prompts: tuple[Prompt, ...]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Drop these sequences and free their blocks now; unknown ids are ignored."""

    sequence_ids: tuple[int, ...]


class ResizeCache(msgspec.Struct, frozen=True, tag="resize_cache"):
    """Grow or shrink the KV cache to `num_blocks`, as near as the worker can; no open sequence is lost."""

    call_id: int
    num_blocks: int


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Give the device's memory back as far as possible; refused while sequences are open."""

    call_id: int


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Be as before the sleep, with a KV cache of `num_blocks`."""

    call_id: int
    num_blocks: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Loading progress for people: `stage` is a short phrase such as "loading weights"; `total` may be 0."""

    stage: str
    done: int
    total: int


Task = Literal["generate", "embed", "score"]
"""What a model does: continue texts, turn them into vectors, or judge pairs of them."""


class WorkerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker holds now.

    `num_kv_blocks` are the blocks of its KV cache and `max_model_len` the longest context that they allow.
    `fixed_bytes` is what it holds of its device besides: weights, workspace, graphs, the driver's share.
    `host_bytes` is what a sleeping worker keeps in this machine's RAM instead.
    """

    num_kv_blocks: int
    max_model_len: int
    fixed_bytes: int
    host_bytes: int = 0
    is_asleep: bool = False


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded engine really got: sizes in bytes, lengths in tokens.

    `fixed_bytes` is all it holds of its device besides the KV cache, and `max_kv_blocks` how far that can grow;
    an encoder has no cache: its block counts are 0.  `embedding_length` is that of an embedding model's vectors.
    """

    architecture: str
    dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    num_kv_blocks: int
    block_size: int
    max_num_seqs: int
    fixed_bytes: int = 0
    max_kv_blocks: int = 0
    task: Task = "generate"
    embedding_length: int = 0
    load_seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def num_kv_tokens(self) -> int:
        return self.num_kv_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """How many requests of the full context fit the KV pool at once."""
        return self.num_kv_tokens / self.max_model_len


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Weights are loaded, the KV pool is allocated and a first token has been produced."""

    facts: WorkerFacts


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The worker gives up and exits; `code` is that of an `EngineError`."""

    code: str
    message: str


class EngineStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Gauges of this moment, then counters since start (`_total`)."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_query_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0


class Steps(msgspec.Struct, frozen=True, tag="steps"):
    outputs: tuple[StepOutput, ...]
    stats: EngineStats


class Memory(msgspec.Struct, frozen=True, tag="memory"):
    """A call is done; what the worker holds now."""

    call_id: int
    memory: WorkerMemory


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A call changed nothing; `code` is that of an `EngineError`."""

    call_id: int
    code: str
    message: str


ToWorker = Start | Submit | Abort | ResizeCache | Sleep | Wake | Shutdown
FromWorker = Progress | Ready | Fatal | Steps | Memory | Refused

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode

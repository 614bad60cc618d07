"""The frames between the daemon and a worker: msgpack over one local ZeroMQ PAIR socket.

One tagged union per direction.  The first frame to a worker is `Start`; it answers with
any number of `Progress`, then `Ready` or `Fatal`.  After `Ready`, `Steps` carries the
outputs of one engine step for all sequences together.  Used by `engine.worker` and
`app.residency.worker_client`; nothing else knows the encoding.
"""

from __future__ import annotations

import msgspec

from engine.api.config import EngineConfig
from engine.api.output import StepOutput
from engine.api.request import Prompt

WIRE_VERSION = 1


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Load this model; a worker of another wire version answers `Fatal`."""

    wire_version: int
    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    prompts: tuple[Prompt, ...]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Drop these sequences and free their blocks now; unknown ids are ignored."""

    sequence_ids: tuple[int, ...]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Loading progress for people: `stage` is a short phrase such as "loading weights"; `total` may be 0."""

    stage: str
    done: int
    total: int


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded engine really got: sizes in bytes, lengths in tokens."""

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


ToWorker = Start | Submit | Abort | Shutdown
FromWorker = Progress | Ready | Fatal | Steps

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode

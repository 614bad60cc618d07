"""`ModelState`: what there is to say of one model in memory, asked for, or failed; plain values.

Built by `app.residency.describe`, handed out by the supervisor; `GET /api/ps`, `quire ps` and `/health` show it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.api.wire import Task

State = Literal[
    "waiting",  # requests wait until there is room
    "loading",  # coming from the disk, or waking up
    "ready",
    "draining",  # open requests finish, new ones wait: it is another model's turn, or it is about to leave
    "asleep",  # its weights are in this machine's RAM
    "failed",  # its worker died or could not be started, and nobody has asked for it since
]


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """One worker and the models that it answers for.

    `names` are installed models of the same files; the first is the one that it was loaded as.  Sizes are in bytes
    and lengths in tokens; all are 0 while they are not known.  `size_bytes` is what the model holds of its `device`
    now: `fixed_bytes` and the KV cache, `kv_bytes`; `host_bytes` is what it keeps in this machine's RAM while asleep.
    `share` is the part of the device that somebody gave it, `share_in_force` the part that it holds.
    `num_running` are sequences in the engine, `num_waiting` requests in line for the model and sequences in line
    inside its worker.  `until` is when it leaves, in seconds since the epoch, if nobody asks for it before:
    None while it is pinned, busy, or kept for ever.  `note` says what it is doing, or why it failed.
    """

    names: tuple[str, ...]
    state: State
    digest: str
    device: str = ""
    size_bytes: int = 0
    fixed_bytes: int = 0
    kv_bytes: int = 0
    host_bytes: int = 0
    share: float | None = None
    share_in_force: float = 0.0
    is_pinned: bool = False
    kv_tokens: int = 0
    kv_usage: float = 0.0
    max_concurrency: float = 0.0
    max_model_len: int = 0
    num_requests: int = 0
    num_running: int = 0
    num_waiting: int = 0
    until: float | None = None
    keep_alive_s: float | None = None
    task: Task = "generate"
    architecture: str = ""
    dtype: str = ""
    pid: int | None = None
    loaded_at: float = 0.0
    notes: tuple[str, ...] = ()
    note: str = ""

    @property
    def name(self) -> str:
        return self.names[0]

"""Every error the engine raises on purpose.

    EngineError                      status 500  engine_error
    ├─ InvalidParameter              status 400  invalid_parameter         names the parameter
    ├─ ContextLengthExceeded         status 400  context_length_exceeded   carries both token counts
    ├─ UnsupportedModel              status 422  unsupported_model
    ├─ BrokenCheckpoint              status 422  broken_checkpoint
    ├─ InsufficientMemory            status 507  insufficient_memory
    ├─ EngineBusy                    status 409  engine_busy
    ├─ EngineAsleep                  status 409  engine_asleep
    └─ WorkerDied                    status 503  worker_died

`status` is the HTTP status an API edge should answer with, `code` never changes
between releases, and the message is one sentence a user can act on.  Nothing here
knows about HTTP itself.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all engine errors; `param` names the offending request field, if there is one."""

    status = 500
    code = "engine_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidParameter(EngineError):
    """A request field has a value that cannot be served."""

    status = 400
    code = "invalid_parameter"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message, param=param)


class ContextLengthExceeded(EngineError):
    """The prompt, or the prompt plus what it must generate, is longer than the context."""

    status = 400
    code = "context_length_exceeded"

    def __init__(
        self, needed_tokens: int, available_tokens: int, *, param: str = "messages", message: str | None = None
    ) -> None:
        super().__init__(
            message
            or f"The request needs {needed_tokens:,} tokens but the context holds "
            f"{available_tokens:,}; shorten the prompt or lower max_tokens.",
            param=param,
        )
        self.needed_tokens = needed_tokens
        self.available_tokens = available_tokens


class UnsupportedModel(EngineError):
    """The checkpoint is sound, but its architecture or format is not implemented."""

    status = 422
    code = "unsupported_model"


class BrokenCheckpoint(EngineError):
    """A checkpoint file is truncated, inconsistent, or lacks tensors the model needs."""

    status = 422
    code = "broken_checkpoint"


class InsufficientMemory(EngineError):
    """There is too little memory, of the device or in the budget, for what was asked."""

    status = 507
    code = "insufficient_memory"


class EngineBusy(EngineError):
    """What was asked needs an engine without open sequences."""

    status = 409
    code = "engine_busy"


class EngineAsleep(EngineError):
    """What was asked needs an engine that is awake."""

    status = 409
    code = "engine_asleep"


class WorkerDied(EngineError):
    """The worker process ended while it still owed an answer."""

    status = 503
    code = "worker_died"

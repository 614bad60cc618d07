"""How a command fails: `CommandFailure`, and the sentence for any other exception."""

from __future__ import annotations

import os
import traceback

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130


class CommandFailure(Exception):
    """Ends the command with one sentence on stderr."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


def failure_sentence(error: Exception) -> str:
    """One sentence for a person.

    Errors that this project raises on purpose (`ClientError`, `AppError`, `StoreError`,
    `EngineError`) bring theirs as `message`; importing them all to ask would cost more than
    the command.  QUIRE_DEBUG=1 shows the traceback of anything.
    """
    if os.environ.get("QUIRE_DEBUG"):
        return "".join(traceback.format_exception(error)).rstrip()
    message = getattr(error, "message", None)
    if isinstance(message, str) and message:
        return message
    if isinstance(error, OSError):
        reason = (error.strerror or str(error) or type(error).__name__).lower()
        what = f" for {error.filename}" if error.filename else ""
        return f"The operating system refused ({reason}{what}); set QUIRE_DEBUG=1 to see where."
    return f"Unexpected {type(error).__name__}: {error}; set QUIRE_DEBUG=1 to see where, and please report it."

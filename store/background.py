"""Questions that may never be answered: by a name server that is filtered, by a network disk whose server is gone.

Neither a socket's timeouts nor anything that reads a disk bounds those, so each is asked in a thread that is left
behind.  Knows nothing of what is asked.  Called by `disk.filesystems`, `folder_reader` and `sources.hub_account`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Answer = TypeVar("_Answer")


def in_background(ask: Callable[[], _Answer]) -> Future[_Answer]:
    """Ask in a thread of its own, which ends with the process at the latest.

    `result(timeout_s)` of what is returned gives the answer, raises what `ask` raised, or TimeoutError.
    """
    # Not a pool's thread: the interpreter waits for those when it ends.
    future: Future[_Answer] = Future()

    def work() -> None:
        try:
            future.set_result(ask())
        except Exception as error:  # noqa: BLE001  # the edge of a thread: whoever waits gets it
            future.set_exception(error)

    threading.Thread(target=work, name="background", daemon=True).start()
    return future

"""One worker as an operating system process: spawn, watch, stop.

The worker's standard input is a pipe that this process never writes to: it closes when the
daemon dies in whatever way, and the worker exits by itself.  Output goes to a log file.
Knows nothing of what is said over the socket; used by `app.residency.workers.worker_client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path


class WorkerProcess:
    """A running child; `wait` ends with it."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self._process = process
        self.log_path = log_path

    @classmethod
    async def spawn(cls, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> WorkerProcess:
        """Start `command` with `environment` added to this process's own.

        The child gets a session of its own, so that Ctrl-C in a terminal reaches the daemon
        alone, which then stops its workers in order.
        """
        with log_path.open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log_file,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        return cls(process, log_path)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> str:
        """Wait for the end; returns how it ended, for people."""
        return describe_exit(await self._process.wait())

    async def stop(self, grace_s: float, timeout_s: float) -> None:
        """Give the process `grace_s` to leave by itself, then terminate it, then kill it."""
        for patience_s, send_signal in ((grace_s, self._process.terminate), (timeout_s, self._process.kill)):
            if self._process.returncode is not None:
                return
            try:
                await asyncio.wait_for(self._process.wait(), patience_s)
            except TimeoutError:
                # It may have gone by itself while the timeout fired.
                with contextlib.suppress(ProcessLookupError):
                    send_signal()
        await self._process.wait()


def describe_exit(return_code: int) -> str:
    """ "exit code 1" or "signal SIGKILL"."""
    if return_code >= 0:
        return f"exit code {return_code}"
    return f"signal {signal.Signals(-return_code).name}"

"""The parent's side of a contender: starts a child process and sends it commands.

A child computes only while it answers, so a loaded contender that waits on its pipe takes no time from
the other.  What children answer is described in `benchmarks.llamacpp.serving`.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parents[2]
_TAIL_CHARACTERS = 4000


class ChildFailed(RuntimeError):
    """A child process ended, or could not be started; the message carries the end of what it wrote to stderr."""


class Child:
    """One child process; `ask` waits for its answer."""

    def __init__(self, python: str, module: str, environment: Mapping[str, str] | None = None) -> None:
        self._stderr = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115  It lives as long as the child.
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        try:
            self._process = subprocess.Popen(
                [python, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            )
        except OSError as error:
            self._stderr.close()
            raise ChildFailed(f"{python} cannot be started: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, do: str, **arguments: Any) -> Any:
        """The result of one command.  Raises `ChildFailed` when the child ends instead of answering."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._process.wait()
            raise ChildFailed(f"the child failed at {do!r}:\n{self._stderr_tail()}")
        return json.loads(answer)["result"]

    def close(self) -> None:
        """End the child by ending its input, and wait for it."""
        self._process.communicate()
        self._stderr.close()

    def _stderr_tail(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()[-_TAIL_CHARACTERS:]

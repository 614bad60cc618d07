"""The child's side of a contender: answers commands, one JSON object a line, until its input ends.

A command is `{"do": NAME, ...arguments}` and is answered by `{"result": ...}`.  A handler that fails ends
the process, and `benchmarks.llamacpp.child` shows what it left on stderr.  Imports the standard library
only, since a child may run in a Python that has llama.cpp and nothing of Quire.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer commands on stdin until it ends; what libraries print goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        handler = handlers[command.pop("do")]
        replies.write(json.dumps({"result": handler(**command)}) + "\n")


def peak_rss_bytes(pid: int | str = "self") -> int:
    """The most memory that a process has ever had resident, pages of mapped files included.

    Read from /proc, because what `getrusage` reports also counts the process that started this one.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"the system does not say how much memory process {pid} has used")


def usage(kv_bytes: int) -> dict[str, float]:
    """What this process has used: CPU seconds of all threads, peak memory, and the KV cache's part of it."""
    return {"cpu_s": time.process_time(), "peak_bytes": peak_rss_bytes(), "kv_bytes": kv_bytes}

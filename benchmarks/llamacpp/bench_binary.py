"""A `llama-bench` binary as a contender: prompt and single-sequence speed only.

It times itself and loads the model anew in every run, so it neither idles beside Quire nor tells its
load time or memory.  Called by `benchmarks/vs_llamacpp.py`.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from benchmarks.llamacpp.tasks import Task


def can_measure(task: Task) -> bool:
    return task.num_sequences == 1 and not task.name.startswith("first_token")


def command_line(bench: str, model: str, threads: int, task: Task) -> list[str]:
    """One repetition of one task, reported as JSON; generation starts from an empty context, as it does there."""
    prompt, generated = (task.prompt_tokens, 0) if task.name.startswith("prompt") else (0, task.max_tokens)
    options = {"-m": model, "-t": threads, "-p": prompt, "-n": generated, "-r": 1, "-o": "json"}
    return [bench, *(str(part) for option in options.items() for part in option)]


def parse(output: str) -> float:
    """Tokens/s of the only test in llama-bench's JSON.  Raises `ValueError` for anything else."""
    tests: list[dict[str, Any]] = json.loads(output)
    if len(tests) != 1 or "avg_ts" not in tests[0]:
        raise ValueError("llama-bench did not report the one test that it was asked for")
    return float(tests[0]["avg_ts"])


def measure(bench: str, model: str, threads: int, task: Task) -> float:
    """Tokens/s of one fresh run.  Raises `subprocess.CalledProcessError` when it fails."""
    command = command_line(bench, model, threads, task)
    return parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

"""What the contenders are compared on, and how a figure is worked out from the arrival times of tokens.

A task is named after its kind and size: `prompt_512`, `first_token_1000`, `generate_16`.  Knows no engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.workloads import Request, repeated, workload

Arrivals = Sequence[Sequence[float]]
"""Seconds from the start of a run to each token of each sequence."""

_NAME = re.compile(r"(prompt|first_token|generate)_(\d+)")


@dataclass(frozen=True, slots=True)
class Task:
    """`num_sequences` prompts of `prompt_tokens`, and `max_tokens` to generate for each."""

    name: str
    num_sequences: int
    prompt_tokens: int
    max_tokens: int

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.max_tokens

    @property
    def unit(self) -> str:
        return "s" if self.name.startswith("first_token") else "tok/s"

    def requests(self, repeat: int, vocab_size: int) -> list[Request]:
        """The same for every contender, and new in every repeat."""
        requests = workload(f"burst{self.num_sequences}_{self.prompt_tokens}_{self.max_tokens}")
        return repeated(requests, repeat, vocab_size)

    def figure(self, arrivals: Arrivals) -> float:
        """Prompt tokens/s until the first token, seconds until the first token, or tokens/s while all decode."""
        if self.name.startswith("prompt"):
            return self.prompt_tokens / arrivals[0][0]
        return arrivals[0][0] if self.name.startswith("first_token") else decode_rate(arrivals)


def parse_task(name: str, *, generate_prompt_tokens: int = 64, generate_tokens: int = 128) -> Task:
    """The task of that name.  Raises `ValueError` for a name that is none."""
    match = _NAME.fullmatch(name)
    if match is None or not (size := int(match[2])):
        raise ValueError(f"{name} is no task; prompt_512, first_token_1000 and generate_16 are, of any size above 0")
    if match[1] == "generate":
        return Task(name, size, generate_prompt_tokens, generate_tokens)
    return Task(name, 1, size, 1)


def decode_rate(arrivals: Arrivals) -> float:
    """Tokens/s of all sequences from when the last of them has its first token until the first of them ends.

    Only there does every sequence decode: an engine that computes prompts in pieces starts some sequences
    earlier than others.
    """
    begin, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    count = sum(begin < time <= end for times in arrivals for time in times)
    if not count:
        raise ValueError("the sequences never decoded together; generate more tokens")
    return count / (end - begin)


def overall_rate(arrivals: Arrivals) -> float:
    """Generated tokens/s from the start of the run to its end, prompts included."""
    return sum(map(len, arrivals)) / max(times[-1] for times in arrivals)

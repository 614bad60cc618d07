"""Quire in process, as one contender's child process.

python -m benchmarks.embedders.quire_child        (commands on stdin: see `benchmarks.llamacpp.serving`)
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.embedders.answer import Answer
from benchmarks.llamacpp.serving import serve, usage


class Contender:
    """The commands of this child; `load` comes first."""

    def load(self, model: str, threads: int) -> dict[str, Any]:
        from engine import LLM

        self._llm = LLM(model, device="cpu", num_threads=threads, dtype="float32")
        return {"dtype": self._llm.facts.dtype}

    def embed(self, texts: list[str]) -> dict[str, Any]:
        before = self._llm.stats().prompt_tokens_total
        started = time.perf_counter()
        vectors = self._llm.embed(texts, truncate=True)
        seconds = time.perf_counter() - started
        return Answer.of(vectors, seconds, self._llm.stats().prompt_tokens_total - before).to_json()


if __name__ == "__main__":
    contender = Contender()
    serve({"load": contender.load, "embed": contender.embed, "usage": lambda: usage(0)})

"""Quire in process, as one contender's child process.

    python -m benchmarks.llamacpp.quire_child        (commands on stdin: see `serving`)

The engine is stepped directly, as `engine.LLM.generate` does, so that each token's arrival can be noted.
Prefix caching is off, since llama.cpp would have to compute every prompt too.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from benchmarks.llamacpp.serving import serve, usage

FIRST_SEQUENCE_ID = 10**9
"""Far above what `LLM` itself hands out."""


class Contender:
    """The commands of this child; `load` comes first."""

    def __init__(self) -> None:
        self._sequence_ids = itertools.count(FIRST_SEQUENCE_ID)
        self._most_blocks = 0

    def load(self, model: str, threads: int, shapes: list[list[int]], **options: Any) -> dict[str, Any]:
        """Load the model for the largest of the [number of sequences, tokens of each]; `options` are `LLM`'s."""
        started = time.perf_counter()
        from engine import LLM

        imported = time.perf_counter()
        self._llm = LLM(
            model,
            device="cpu",
            num_threads=threads,
            max_num_seqs=max(num_sequences for num_sequences, _ in shapes),
            max_model_len=max(length for _, length in shapes),
            enable_prefix_caching=False,
            **options,
        )
        ready = time.perf_counter()
        facts = self._llm.facts
        return {
            "import_s": imported - started,
            "construct_s": ready - imported,
            "load_s": ready - imported,
            "vocab_size": facts.vocab_size,
            "details": {
                "dtype": facts.dtype,
                "weight_bytes": facts.weight_bytes,
                "kv_tokens": facts.num_kv_tokens,
                "kv_bytes_per_token": facts.kv_bytes_per_token,
            },
        }

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
        """Arrival times of every token, in seconds from the start of the run."""
        from engine.api.request import Prompt
        from engine.api.sampling import SamplingParams

        engine = self._llm.engine
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        queued = [Prompt(next(self._sequence_ids), tuple(prompt), max_tokens, sampling) for prompt in prompts]
        arrivals: dict[int, list[float]] = {prompt.sequence_id: [] for prompt in queued}
        started = time.perf_counter()
        for prompt in queued:
            engine.submit(prompt)
        while engine.has_work:
            outputs = engine.step()
            now = time.perf_counter() - started
            self._note_blocks()
            for output in outputs:
                if output.finish_reason in ("error", "abort"):
                    raise RuntimeError(output.error_message or "the engine dropped a sequence")
                arrivals[output.sequence_id] += [now] * len(output.token_ids)
        assert all(len(times) == max_tokens for times in arrivals.values()), "a sequence has ended early"
        return list(arrivals.values())

    def usage(self) -> dict[str, float]:
        """The KV cache's part is what was touched of the pool: the most blocks ever in use at once.

        The pool is a zeroed allocation, which takes memory page by page as blocks are first written, and
        without prefix caching freed blocks are handed out first again.
        """
        facts = self._llm.facts
        return usage(self._most_blocks * facts.block_size * facts.kv_bytes_per_token)

    def _note_blocks(self) -> None:
        stats = self._llm.stats()
        self._most_blocks = max(self._most_blocks, stats.num_blocks - stats.num_free_blocks)


if __name__ == "__main__":
    contender = Contender()
    serve({"load": contender.load, "run": contender.run, "usage": contender.usage})

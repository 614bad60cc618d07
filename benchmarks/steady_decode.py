"""A batch of sequences that do nothing but decode, for scripts that look at single steps.

Each sequence has random ids of its own, so no two share a block of the cache.  Drives the public
`LLM.engine`.  Used by `benchmarks/profile.py` and `benchmarks/sweep.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from engine import LLM
from engine.api.request import Prompt
from engine.api.sampling import SamplingParams

_HIGHEST_ID = 10_000
_REHEARSED_TOKENS = 8


class DoesNotFit(Exception):
    """The cache does not hold all sequences at once."""


def rehearse(llm: LLM, batches: Iterable[int], *, first_id: int) -> None:
    """Decode a little at each batch size, and let the engine prepare what it found it needs for it.

    It does so only while nothing runs, so a measurement that comes later cannot wait for it.
    """
    engine = llm.engine
    sampling = SamplingParams(temperature=0.0, max_tokens=_REHEARSED_TOKENS, ignore_eos=True)
    for batch in batches:
        for sequence_id in range(first_id, first_id + batch):
            engine.submit(Prompt(sequence_id, (1, 2, 3), _REHEARSED_TOKENS, sampling))
        first_id += batch
        while engine.has_work:
            engine.step()
    while engine.has_spare_work:
        engine.spare_step()


class SteadyDecode:
    """`batch` sequences of `context` tokens each; ready to `step` once built, until `close`.

    Of the tokens that each may generate, `max_steps` are left when all have begun.  Raises
    `DoesNotFit`.
    """

    def __init__(self, llm: LLM, batch: int, context: int, max_steps: int, *, first_id: int, seed: int = 0) -> None:
        self._engine = llm.engine
        rng = random.Random(seed)
        highest_id = min(_HIGHEST_ID, llm.facts.vocab_size - 1)
        # Early sequences go on decoding while later ones are prefilled, in steps of at least one token each.
        max_tokens = max_steps + batch + (batch * context) // 64 + 16
        max_tokens = min(max_tokens, llm.facts.max_model_len - context)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._running = set(range(first_id, first_id + batch))
        for sequence_id in sorted(self._running):
            token_ids = tuple(rng.randint(0, highest_id) for _ in range(context))
            self._engine.submit(Prompt(sequence_id, token_ids, max_tokens, sampling))
        self._await_all_begun(llm)

    @property
    def batch(self) -> int:
        return len(self._running)

    def step(self) -> list[int]:
        """Run one step of the engine; returns the sequences that got a token from the oldest one in flight."""
        outputs = self._engine.step()
        if ended := [output for output in outputs if output.finish_reason is not None]:
            raise RuntimeError(f"sequence {ended[0].sequence_id} ended ({ended[0].finish_reason}) while being measured")
        return [output.sequence_id for output in outputs]

    def _await_all_begun(self, llm: LLM) -> None:
        begun: set[int] = set()
        num_preemptions = llm.stats().preemptions_total
        while begun != self._running:
            outputs = self._engine.step()
            begun.update(output.sequence_id for output in outputs)
            # Some wait for others to end, or take turns with them.
            has_ended = any(output.finish_reason is not None for output in outputs)
            if has_ended or llm.stats().preemptions_total > num_preemptions:
                num_sequences = self.batch
                self.close()
                raise DoesNotFit(f"The KV cache does not hold {num_sequences} such sequences at once.")

    def shrink(self, batch: int) -> None:
        """Drop sequences until `batch` are left."""
        for sequence_id in sorted(self._running)[batch:]:
            self._engine.abort(sequence_id)
            self._running.discard(sequence_id)

    def close(self) -> None:
        """Drop all sequences and let the steps in flight end."""
        self.shrink(0)
        while self._engine.has_work:
            self._engine.step()

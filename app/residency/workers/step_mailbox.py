"""`StepMailbox`: what a worker sends for one request, waiting for the task that streams it.

Whatever has come by the time the reader looks is taken together, several steps of a sequence as
one: a reader that falls behind catches up instead of being woken for every token, and one that
keeps up gets every token at once.  Filled by `app.residency.workers.worker_client`, read by
`app.generation` and `app.pooling`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.api.output import StepOutput


class StepMailbox:
    """Step outputs of the sequences of one request, for one reader."""

    def __init__(self) -> None:
        self._waiting: list[StepOutput] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: StepOutput) -> None:
        self._waiting.append(output)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[StepOutput]:
        """Wait for at least one output; returns what has come, merged by `merge_steps`."""
        if not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        taken, self._waiting = self._waiting, []
        return taken if len(taken) == 1 else merge_steps(taken)


def merge_steps(outputs: Sequence[StepOutput]) -> list[StepOutput]:
    """One output per sequence, as if a single step had sampled all its tokens, in order of first appearance.

    A failure stays apart and comes last, so that the tokens before it can still be shown.
    """
    steps: dict[int, list[StepOutput]] = {}
    failures: list[StepOutput] = []
    for output in outputs:
        if output.finish_reason in ("error", "abort"):
            failures.append(output)
        else:
            steps.setdefault(output.sequence_id, []).append(output)
    return [*map(_as_one, steps.values()), *failures]


def _as_one(steps: list[StepOutput]) -> StepOutput:
    last = steps[-1]
    if len(steps) == 1:
        return last
    return StepOutput(
        last.sequence_id,
        tuple(token_id for step in steps for token_id in step.token_ids),
        last.finish_reason,
        last.stop_token_id,
        max(step.num_cached_tokens for step in steps),
        tuple(entry for step in steps for entry in step.logprobs),
    )

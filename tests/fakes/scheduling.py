"""Steps of a scheduler whose sampled tokens the test chooses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.api.output import StepOutput
from engine.api.request import Prompt
from engine.api.sampling import SamplingParams
from engine.core.batch import SampledTokens, ScheduledBatch
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig

TOKEN = 7


def make_scheduler(**overrides: Any) -> Scheduler:
    settings: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "block_size": 4,
        "num_blocks": 64,
        "enable_prefix_caching": False,
    }
    return Scheduler(SchedulerConfig(**(settings | overrides)))


def add(
    scheduler: Scheduler, sequence_id: int, prompt: int | Iterable[int], max_tokens: int = 100, **sampling: Any
) -> None:
    """`prompt` is a number of tokens, distinct from those of other sequences, or the token ids."""
    first = 1000 * (sequence_id + 1)
    token_ids = tuple(range(first, first + prompt)) if isinstance(prompt, int) else tuple(prompt)
    stop_token_ids = sampling.pop("stop_token_ids", ())
    scheduler.add(Prompt(sequence_id, token_ids, max_tokens, SamplingParams(**sampling), stop_token_ids))


def schedule(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    return batch


def commit(scheduler: Scheduler, batch: ScheduledBatch, token_id: int = TOKEN) -> list[StepOutput]:
    count = sum(sequence.samples for sequence in batch.sequences)
    return scheduler.commit(batch, SampledTokens((token_id,) * count, (None,) * count))


def step(scheduler: Scheduler, token_id: int = TOKEN) -> list[StepOutput]:
    return commit(scheduler, schedule(scheduler), token_id)


def shares(batch: ScheduledBatch) -> dict[int, int]:
    """Tokens per sequence of a batch."""
    return {sequence.sequence_id: sequence.num_tokens for sequence in batch.sequences}

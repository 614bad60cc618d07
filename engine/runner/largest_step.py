"""The largest step an engine can be asked for, to learn what it needs before memory is divided.

Called while an engine is built for a GPU.  Running it also loads libraries and compiles kernels.
"""

from __future__ import annotations

from engine.api.request import Pooling
from engine.api.sampling import SamplingParams
from engine.core.batch import RowStart, ScheduledBatch, ScheduledSequence

EVERY_WAY = SamplingParams(
    temperature=0.8, top_k=20, top_p=0.9, min_p=0.1, seed=0, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=1
)
"""Everything that makes sampling take more memory, and more kernels."""


def largest_step(
    num_tokens: int, max_num_seqs: int, max_model_len: int, pooling: Pooling | None = None
) -> ScheduledBatch:
    """A batch of as many new sequences as there may be, with `num_tokens` tokens in all.

    All sample in every way, or are pooled as `pooling` says.  All their blocks are block 0, so that a cache of one
    block will do: the values are nonsense, the work is real.
    """
    is_pooled = pooling is not None
    num_sequences = min(max_num_seqs, num_tokens)
    share, left_over = divmod(num_tokens, num_sequences)
    lengths = [min(share + (index < left_over), max_model_len) for index in range(num_sequences)]
    return ScheduledBatch(
        step=0,
        sequences=tuple(
            ScheduledSequence(row, row, start=0, num_tokens=length, samples=not is_pooled, pools=is_pooled)
            for row, length in enumerate(lengths)
        ),
        num_decodes=0,
        row_starts=tuple(
            RowStart(row, row, (0,) * length, length, EVERY_WAY, stop_token_ids=(), pooling=pooling)
            for row, length in enumerate(lengths)
        ),
        block_updates=(),
        num_pooled=num_sequences if is_pooled else 0,
    )

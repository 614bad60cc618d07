"""`EncoderBatch`: the texts of one step as arrays, end to end and without padding.

Made anew for each step by `engine.runner.encoder_runner`; what runs the step takes its inputs from here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.api.request import Prompt


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """N texts of T tokens together, in order of their lengths, so that attention finds equal ones side by side.

    `prompts` are in that order too.  `inputs` are token ids, positions from 0, and which text of a pair a token
    is in (0 or 1): int32 [3, T].  Text n is at `starts[n]` up to `starts[n + 1]`.
    """

    prompts: tuple[Prompt, ...]
    inputs: np.ndarray
    lengths: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]


def build_encoder_batch(prompts: Sequence[Prompt], *, num_types: int) -> EncoderBatch:
    """Lay the texts end to end; a model of one type takes all tokens for the first text's."""
    ordered = tuple(sorted(prompts, key=lambda prompt: len(prompt.token_ids)))
    lengths = tuple(len(prompt.token_ids) for prompt in ordered)
    starts = tuple(itertools.accumulate(lengths, initial=0))
    inputs = np.zeros((3, starts[-1]), dtype=np.int32)
    for prompt, (start, end) in zip(ordered, itertools.pairwise(starts), strict=True):
        inputs[0, start:end] = prompt.token_ids
        second = prompt.pooling.second_start if prompt.pooling is not None else 0
        if second and num_types > 1:
            inputs[2, start + second : end] = 1
    inputs[1] = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    return EncoderBatch(ordered, inputs, lengths, starts)

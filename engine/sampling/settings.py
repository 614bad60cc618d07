"""The sampling parameters of one step as one array, so that they reach the device in one copy.

Everything is float64: it holds token ids, positions and the draws' 53-bit uniform numbers exactly.
Built by `engine.sampling.sampler` from the rows of a step; read by the torch functions of this
package and by `engine.kernels.sample` and `engine.kernels.adjust`, which do the same work on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.core.batch import RowStart
from engine.runner.transfer import upload
from engine.sampling import seeds

DRAW_COLUMNS = 6
PENALTY_COLUMNS = 7
ADDITION_COLUMNS = 3
# Colder rows draw as if at this temperature: scores stay finite, and no two logits are that close.
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row to sample: `num_tokens` are known so far, so the new token takes that position.

    `seed` is the request's own, or one derived for it.
    """

    start: RowStart
    num_tokens: int
    seed: int

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.start.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Device views of one float64 array, for N rows over a vocabulary of V tokens.

    draws      [N, 6] 1/temperature (0: greedy), top-k (V: no limit), top-p (1: no limit), how far below the largest
                      logit min-p reaches (<= 0, -inf: no limit), uniform number, 1 if top-k or top-p limits the row
    searching  [M]    the rows that top-k or top-p limits
    penalties  [P, 7] row of logits, row of the token table, prompt tokens, known tokens,
                      repetition, frequency and presence penalty
    additions  [A, 3] row of logits, token id, what is added to its logit; no pair occurs twice
    reporting  [R]    the rows that want logprobs

    `any_draws` is false when all rows are greedy; `longest` is the most known tokens of a row with penalties.
    """

    draws: torch.Tensor
    searching: torch.Tensor
    penalties: torch.Tensor
    additions: torch.Tensor
    reporting: torch.Tensor
    any_draws: bool
    longest: int

    @property
    def adjusts(self) -> bool:
        return bool(len(self.penalties) or len(self.additions))


def build_settings(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> StepSettings:
    """Gather what the rows ask for, and start its way to the device; the host does not wait."""
    draws: list[float] = []
    searching: list[float] = []
    penalties: list[float] = []
    additions: list[float] = []
    for index, row in enumerate(rows):
        draws += _draw_settings(row, vocab_size)
        if draws[-1]:
            searching.append(index)
        if row.start.sampling.has_penalties:
            penalties += _penalty_settings(index, row)
        for token_id, value in _additions(row).items():
            additions += (index, token_id, value)
    reporting = reporting_rows(rows)
    views = _upload([draws, searching, penalties, additions, list(reporting)], device)
    return StepSettings(
        draws=views[0].view(-1, DRAW_COLUMNS),
        searching=views[1],
        penalties=views[2].view(-1, PENALTY_COLUMNS),
        additions=views[3].view(-1, ADDITION_COLUMNS),
        reporting=views[4],
        any_draws=any(not row.start.sampling.is_greedy for row in rows),
        longest=max((row.num_tokens for row in rows if row.start.sampling.has_penalties), default=0),
    )


def is_plain(row: SamplingRow) -> bool:
    """Whether the row's token is simply its likeliest one, and nothing is reported."""
    return takes_likeliest(row.start) and not _is_too_early_to_stop(row)


def takes_likeliest(start: RowStart) -> bool:
    """Whether nothing but a stop token that comes too early keeps the sequence from its likeliest token."""
    params = start.sampling
    return params.is_greedy and params.logprobs is None and not params.has_penalties and not params.logit_bias


def reporting_rows(rows: Sequence[SamplingRow]) -> tuple[int, ...]:
    """The rows that want logprobs."""
    return tuple(index for index, row in enumerate(rows) if row.start.sampling.logprobs is not None)


def _draw_settings(row: SamplingRow, vocab_size: int) -> tuple[float, ...]:
    params = row.start.sampling
    if params.is_greedy:
        return (0.0, vocab_size, 1.0, -math.inf, 0.0, 0.0)
    temperature = max(params.temperature, MIN_TEMPERATURE)
    top_k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
    min_p_reach = temperature * math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    is_searching = top_k < vocab_size or params.top_p < 1.0
    uniform = seeds.uniform(row.seed, row.num_tokens)
    return (1.0 / temperature, top_k, params.top_p, min_p_reach, uniform, float(is_searching))


def _penalty_settings(index: int, row: SamplingRow) -> tuple[float, ...]:
    params = row.start.sampling
    return (
        index,
        row.start.row,
        row.start.num_prompt_tokens,
        row.num_tokens,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )


def _additions(row: SamplingRow) -> dict[int, float]:
    """The request's `logit_bias`, and minus infinity for stop tokens before `min_tokens` is reached."""
    bias = row.start.sampling.logit_bias or {}
    if _is_too_early_to_stop(row):
        return {**bias, **dict.fromkeys(row.start.stop_token_ids, -math.inf)}
    return bias


def may_stop_too_early(start: RowStart) -> bool:
    """Whether stop tokens are forbidden to the sequence's first tokens."""
    return bool(start.sampling.min_tokens and start.stop_token_ids)


def _is_too_early_to_stop(row: SamplingRow) -> bool:
    return may_stop_too_early(row.start) and row.num_output_tokens < row.start.sampling.min_tokens


def _upload(parts: list[list[float]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The parts as views of one float64 array on the device, copied there from pinned memory without waiting."""
    packed = upload(np.array([value for part in parts for value in part], dtype=np.float64), device)
    return tuple(torch.split(packed, [len(part) for part in parts]))

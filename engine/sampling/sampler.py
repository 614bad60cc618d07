"""Chooses the next token of every sampling sequence of a step, and reports logprobs on request.

Logprobs are those of the model itself, before penalties, bias and temperature.  The sampler
reads rows but keeps no state; it is called by `engine.runner.model_runner` once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.api.output import TokenLogprobs
from engine.core.batch import RowStart
from engine.sampling import adjust, seeds
from engine.sampling.filters import Filters, draw


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


def sample(
    logits: torch.Tensor, rows: Sequence[SamplingRow], token_ids: torch.Tensor
) -> tuple[torch.Tensor, tuple[TokenLogprobs | None, ...]]:
    """Sample one token per row.

    logits float32 [N, V], which is overwritten; `token_ids` int64 [max_num_seqs, max_model_len] is the
    row table's.  Returns int64 [N] and the logprobs of the rows that asked for them.
    """
    reporting = [index for index, row in enumerate(rows) if row.start.sampling.logprobs is not None]
    model_logprobs = logits[reporting].log_softmax(-1) if reporting else None
    _adjust(logits, rows, token_ids)
    sampled = logits.argmax(-1)
    drawing = [index for index, row in enumerate(rows) if not row.start.sampling.is_greedy]
    if drawing:
        sampled[drawing] = _draw(logits[drawing], [rows[index] for index in drawing])
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    if model_logprobs is not None:
        for position, index in enumerate(reporting):
            count = rows[index].start.sampling.logprobs
            logprobs[index] = _report(model_logprobs[position], int(sampled[index]), count or 0)
    return sampled, tuple(logprobs)


def _adjust(logits: torch.Tensor, rows: Sequence[SamplingRow], token_ids: torch.Tensor) -> None:
    penalised = [index for index, row in enumerate(rows) if row.start.sampling.has_penalties]
    if penalised:
        chosen = [rows[index] for index in penalised]
        longest = max(row.num_tokens for row in chosen)
        affected = logits[penalised]
        adjust.apply_penalties(
            affected,
            token_ids[[row.start.row for row in chosen], :longest],
            [row.start.num_prompt_tokens for row in chosen],
            [row.num_tokens for row in chosen],
            [row.start.sampling for row in chosen],
        )
        logits[penalised] = affected
    for index, row in enumerate(rows):
        params = row.start.sampling
        if params.logit_bias:
            adjust.apply_bias(logits[index], params.logit_bias)
        if row.num_output_tokens < params.min_tokens and row.start.stop_token_ids:
            adjust.forbid(logits[index], row.start.stop_token_ids)


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    device = logits.device
    params = [row.start.sampling for row in rows]
    filters = Filters(
        temperature=torch.tensor([p.temperature for p in params], device=device),
        top_k=torch.tensor([max(p.top_k, 0) for p in params], device=device),
        top_p=torch.tensor([p.top_p for p in params], device=device),
        min_p=torch.tensor([p.min_p for p in params], device=device),
    )
    uniform = torch.tensor(
        [seeds.uniform(row.seed, row.num_tokens) for row in rows], dtype=torch.float64, device=device
    )
    return draw(logits, filters, uniform)


def _report(logprobs: torch.Tensor, sampled_id: int, count: int) -> TokenLogprobs:
    """Logprobs [V] of one position as plain values."""
    top_logprobs, top_ids = logprobs.topk(count)
    return TokenLogprobs(float(logprobs[sampled_id]), tuple(top_ids.tolist()), tuple(top_logprobs.tolist()))

"""Adjusts logits before a token is chosen: penalties, bias, and stop tokens that come too early.

All functions change `logits` float32 [R, V] in place.  Token counts are taken from the rows'
token ids at every step, so there is no state that preemption or a reused row could spoil.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.api.sampling import SamplingParams


def apply_penalties(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_prompt_tokens: Sequence[int],
    num_tokens: Sequence[int],
    params: Sequence[SamplingParams],
) -> None:
    """Presence, frequency and repetition penalties.

    `token_ids` int64 [R, L] holds each row's prompt and output, valid up to `num_tokens`.
    Presence and frequency count output tokens (OpenAI API reference); repetition divides
    positive and multiplies negative logits of every token seen (Keskar et al. 2019, CTRL).
    """
    device = logits.device
    position = torch.arange(token_ids.shape[1], device=device)
    is_known = position < torch.tensor(num_tokens, device=device)[:, None]
    is_output = is_known & (position >= torch.tensor(num_prompt_tokens, device=device)[:, None])
    seen_counts = torch.zeros_like(logits).scatter_add_(1, token_ids, is_known.to(logits.dtype))
    output_counts = torch.zeros_like(logits).scatter_add_(1, token_ids, is_output.to(logits.dtype))

    repetition = _column([p.repetition_penalty for p in params], device)
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    torch.where(seen_counts > 0, penalised, logits, out=logits)
    logits -= _column([p.frequency_penalty for p in params], device) * output_counts
    logits -= _column([p.presence_penalty for p in params], device) * (output_counts > 0)


def apply_bias(logits_row: torch.Tensor, bias: dict[int, float]) -> None:
    """Add the request's `logit_bias` to one row of logits [V]."""
    token_ids = torch.tensor(list(bias), device=logits_row.device)
    logits_row.index_add_(0, token_ids, torch.tensor(list(bias.values()), device=logits_row.device))


def forbid(logits_row: torch.Tensor, token_ids: Sequence[int]) -> None:
    """Make tokens impossible in one row of logits [V]: stop tokens before `min_tokens` is reached."""
    logits_row[list(token_ids)] = float("-inf")


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

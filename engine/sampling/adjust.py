"""Adjusts logits before a token is chosen: penalties, bias, and stop tokens that come too early.

Token counts are taken from the rows' token ids at every step, so there is no state that preemption
or a reused row could spoil.  In plain torch, for the CPU; `engine.kernels.adjust` does the same on a GPU.
"""

from __future__ import annotations

import torch

from engine.sampling.settings import StepSettings


def adjust(logits: torch.Tensor, settings: StepSettings, token_ids: torch.Tensor) -> None:
    """Change logits float32 [N, V] in place; `token_ids` int32 or int64 [R, L] holds each row's prompt and output."""
    for penalties in settings.penalties.tolist():
        row, table_row, num_prompt_tokens, num_tokens = (int(value) for value in penalties[:4])
        prompt, output = token_ids[table_row, :num_tokens].long().tensor_split([num_prompt_tokens])
        _penalise(logits[row], prompt, output, *penalties[4:])
    if len(settings.additions):
        rows, ids, values = settings.additions.unbind(1)
        logits.index_put_((rows.long(), ids.long()), values.float(), accumulate=True)


def _penalise(
    logits: torch.Tensor,
    prompt: torch.Tensor,
    output: torch.Tensor,
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    """Penalties on the logits [V] of one row.

    Presence and frequency count output tokens (OpenAI API reference); repetition divides
    positive and multiplies negative logits of every token seen (Keskar et al. 2019, CTRL).
    """
    if repetition != 1.0:
        seen = torch.cat((prompt, output)).unique()
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / repetition, values * repetition)
    ids, counts = output.unique(return_counts=True)
    logits[ids] -= frequency * counts.float() + presence

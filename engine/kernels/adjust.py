"""Penalties, bias and forbidden tokens on the device: only the logits they concern are touched.

Tokens are counted into a buffer of the vocabulary's size for each row with penalties; then every
position of the row asks for its token's count and takes it away, so that the first one to ask, and no
other, changes the logit.  The torch counterpart, with the definitions, is `engine.sampling.adjust`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.sampling.settings import ADDITION_COLUMNS, PENALTY_COLUMNS, StepSettings

_TILE = 512
_COLUMNS = tl.constexpr(PENALTY_COLUMNS)
_ADDITION_COLUMNS = tl.constexpr(ADDITION_COLUMNS)
# Set in a count when the prompt holds the token; the bits below count it in the output.
_IN_PROMPT = tl.constexpr(1 << 30)
# Parts of one array of settings, at any even or odd index: a kernel for each alignment would be compiled while serving.
_UNALIGNED = ["penalties", "additions"]


@triton.jit
def _known_tokens(setting, token_ids, row_length, TILE: tl.constexpr):
    """One tile of a row's token ids: (ids, which of them are prompt, which are output)."""
    table_row = tl.load(setting + 1).to(tl.int64)
    position = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_prompt = position < tl.load(setting + 2).to(tl.int32)
    is_known = position < tl.load(setting + 3).to(tl.int32)
    ids = tl.load(token_ids + table_row * row_length + position, mask=is_known, other=0).to(tl.int64)
    return ids, is_known & is_prompt, is_known & (is_prompt == 0)


@triton.jit(do_not_specialize=_UNALIGNED)
def _count_kernel(
    penalties,
    token_ids,
    counts,
    row_length,
    vocab_size,
    TILE: tl.constexpr,
):
    line = tl.program_id(0)
    ids, is_prompt, is_output = _known_tokens(penalties + line * _COLUMNS, token_ids, row_length, TILE)
    count = counts + line.to(tl.int64) * vocab_size + ids
    tl.atomic_add(count, 1, mask=is_output, sem="relaxed")
    tl.atomic_or(count, _IN_PROMPT, mask=is_prompt, sem="relaxed")


@triton.jit(do_not_specialize=_UNALIGNED)
def _penalise_kernel(
    logits,
    penalties,
    token_ids,
    counts,
    row_length,
    vocab_size,
    TILE: tl.constexpr,
):
    line = tl.program_id(0)
    setting = penalties + line * _COLUMNS
    row = tl.load(setting).to(tl.int64)
    repetition = tl.load(setting + 4).to(tl.float32)
    frequency = tl.load(setting + 5).to(tl.float32)
    presence = tl.load(setting + 6).to(tl.float32)
    ids, is_prompt, is_output = _known_tokens(setting, token_ids, row_length, TILE)
    is_known = is_prompt | is_output
    count = tl.atomic_xchg(counts + line.to(tl.int64) * vocab_size + ids, 0, mask=is_known, sem="relaxed")
    is_first = is_known & (count > 0)
    num_output = count & (_IN_PROMPT - 1)
    logit = logits + row * vocab_size + ids
    value = tl.load(logit, mask=is_first, other=0.0)
    value = tl.where(value > 0.0, value / repetition, value * repetition)
    value -= tl.where(num_output > 0, frequency * num_output.to(tl.float32) + presence, 0.0)
    tl.store(logit, value, mask=is_first)


@triton.jit(do_not_specialize=[*_UNALIGNED, "num_additions"])
def _add_kernel(logits, additions, num_additions, vocab_size, TILE: tl.constexpr):
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = entry < num_additions
    addition = additions + entry * _ADDITION_COLUMNS
    row = tl.load(addition, mask=inside, other=0.0).to(tl.int64)
    token = tl.load(addition + 1, mask=inside, other=0.0).to(tl.int64)
    value = tl.load(addition + 2, mask=inside, other=0.0).to(tl.float32)
    logit = logits + row * vocab_size + token
    tl.store(logit, tl.load(logit, mask=inside, other=0.0) + value, mask=inside)


def adjust(logits: torch.Tensor, settings: StepSettings, token_ids: torch.Tensor) -> None:
    """Change logits float32 [N, V] in place; `token_ids` int32 or int64 [R, L] holds each row's prompt and output."""
    vocab_size = logits.shape[1]
    num_penalised, num_additions = len(settings.penalties), len(settings.additions)
    if num_penalised:
        counts = torch.zeros((num_penalised, vocab_size), dtype=torch.int32, device=logits.device)
        grid = (num_penalised, triton.cdiv(settings.longest, _TILE))
        sizes = (token_ids.shape[1], vocab_size)
        _count_kernel[grid](settings.penalties, token_ids, counts, *sizes, TILE=_TILE)
        _penalise_kernel[grid](logits, settings.penalties, token_ids, counts, *sizes, TILE=_TILE)
    if num_additions:
        programs = (triton.cdiv(num_additions, _TILE),)
        _add_kernel[programs](logits, settings.additions, num_additions, vocab_size, TILE=_TILE)

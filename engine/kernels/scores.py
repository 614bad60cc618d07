"""What the sampling kernels share: loading logits, weighing them, and measuring rows.

A score is a logit in float32, confined to +-1e30 (NaN to -1e30).  Used by `engine.kernels.sample` and
`engine.kernels.threshold`; the definitions are those of `engine.sampling.filters`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.greedy import pack_best, split_vocabulary, unpack_value
from engine.kernels.launch import pdl_options, supports_pdl
from engine.sampling.filters import LIKELIEST_WEIGHT, LOGIT_LIMIT
from engine.sampling.settings import DRAW_COLUMNS

COLUMNS = tl.constexpr(DRAW_COLUMNS)
LIMIT = tl.constexpr(LOGIT_LIMIT)
_UNIT = tl.constexpr(LIKELIEST_WEIGHT)
_TILE = 2048
# Of one row, all zero after `measure`; `engine.kernels.threshold` counts in it.
TALLY_SIZE = 64


@dataclass(frozen=True, slots=True)
class Measured:
    """best int64 [N, S]: largest logit of each split of a row, with its id (`pack_best`); mean float32 [N, S];
    tally int64 [N, TALLY_SIZE], zeros."""

    best: torch.Tensor
    mean: torch.Tensor
    tally: torch.Tensor


@triton.jit
def begin(PDL: tl.constexpr):
    """The start of a kernel that may be placed before its predecessor is done."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def load_scores(logits, row, token, vocab_size):
    """Scores of the tokens; minus infinity, below every score, beyond the vocabulary."""
    inside = token < vocab_size
    value = tl.load(logits + row.to(tl.int64) * vocab_size + token, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(value >= -LIMIT, tl.where(value > LIMIT, LIMIT, value), -LIMIT)
    return tl.where(inside, value, float("-inf"))


@triton.jit
def weigh(scores, peak, inverse_temperature):
    """exp of the scaled scores relative to the largest, as int64 in units of 2^-40."""
    return (tl.exp((scores - peak) * inverse_temperature) * _UNIT).to(tl.int64)


@triton.jit
def share_of(share, total):
    """`share` float64 below 1 of `total` int64, as a whole number below it."""
    return tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def peak_of(best, row, num_splits, SPLITS: tl.constexpr):
    """The largest score of the row."""
    split = tl.arange(0, SPLITS)
    bests = tl.load(best + row * num_splits + split, mask=split < num_splits, other=-0x7FFFFFFFFFFFFFFF)
    return unpack_value(tl.max(bests, 0))


@triton.jit
def _measure_kernel(
    logits,
    best,
    mean,
    tally,
    vocab_size,
    split_size,
    TILE: tl.constexpr,
    TALLY: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0)
    split = tl.program_id(1)
    start = split * split_size
    lane = tl.arange(0, TILE)
    largest = tl.full((TILE,), float("-inf"), tl.float32)
    index = start + lane
    total = tl.zeros((TILE,), tl.float32)
    count = tl.zeros((TILE,), tl.float32)
    for offset in range(start, tl.minimum(start + split_size, vocab_size), TILE):
        token = offset + lane
        scores = load_scores(logits, row, token, vocab_size)
        is_larger = scores > largest
        largest = tl.where(is_larger, scores, largest)
        index = tl.where(is_larger, token, index)
        # Forbidden tokens would pull the mean away from the rest.
        is_possible = scores > -LIMIT
        total += tl.where(is_possible, scores, 0.0)
        count += is_possible.to(tl.float32)
    top = tl.max(largest, 0)
    first = tl.min(tl.where(largest == top, index, 0x7FFFFFFF), 0)
    place = row * tl.num_programs(1) + split
    tl.store(best + place, pack_best(top, first))
    num_possible = tl.sum(count, 0)
    tl.store(mean + place, tl.where(num_possible > 0.0, tl.sum(total, 0) / tl.maximum(num_possible, 1.0), top))
    if split == 0:
        entry = tl.arange(0, TALLY)
        tl.store(tally + row * TALLY + entry, tl.zeros((TALLY,), tl.int64))


def measure(logits: torch.Tensor) -> Measured:
    """Measure the rows of logits [N, V], in any floating dtype, contiguous."""
    assert logits.is_contiguous()
    num_rows, vocab_size = logits.shape
    device = logits.device
    num_splits, split_size = split_vocabulary(num_rows, vocab_size, _TILE, device)
    measured = Measured(
        torch.empty((num_rows, num_splits), dtype=torch.int64, device=device),
        torch.empty((num_rows, num_splits), dtype=torch.float32, device=device),
        torch.empty((num_rows, TALLY_SIZE), dtype=torch.int64, device=device),
    )
    _measure_kernel[(num_rows, num_splits)](
        logits,
        measured.best,
        measured.mean,
        measured.tally,
        vocab_size,
        split_size,
        TILE=_TILE,
        TALLY=TALLY_SIZE,
        PDL=supports_pdl(device),
        num_warps=4,
        **pdl_options(device),
    )
    return measured

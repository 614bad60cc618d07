"""Finds the smallest logit that top-k, top-p and min-p keep, without sorting.

A row's threshold is bracketed twice: a ladder of rungs between the largest logit and somewhat below the
mean counts and weighs the tokens above each rung; the tokens between the two rungs around the threshold
are gathered; among those, one program narrows the interval of possible values eightfold per pass,
on the integers whose order is that of the logits, until a single value is left.  It is exact
whatever the rungs are: they decide only how many tokens are gathered.  Called by `engine.kernels.sample`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.greedy import padded_splits, split_vocabulary
from engine.kernels.launch import pdl_options, supports_pdl
from engine.kernels.scores import (
    COLUMNS,
    LIMIT,
    TALLY_SIZE,
    Measured,
    begin,
    load_scores,
    peak_of,
    share_of,
    weigh,
)
from engine.sampling.settings import StepSettings

_RUNGS = tl.constexpr(16)
# Rungs between the largest logit and the mean; the others but the last go on below it.
_RUNGS_ABOVE_MEAN = tl.constexpr(11.0)
_TALLY = tl.constexpr(TALLY_SIZE)
_PIVOTS = tl.constexpr(8)
_LADDER_TILE = 256
_LADDER_SPLIT = 4 * _LADDER_TILE
_GATHER_TILE = 1024
_NARROW_TILE = 1024
# Candidates that a row has room for: this many, or a quarter of the vocabulary.
_LEAST_CAPACITY = 4096
# Low bits that are equal in all logits of a dtype, because float32 has more of them.
_SPARE_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@triton.jit
def _place_rungs(best, mean, row, num_splits, SPLITS: tl.constexpr):
    """(largest score, falling rungs [16], the last of them below every score)."""
    split = tl.arange(0, SPLITS)
    means = tl.load(mean + row * num_splits + split, mask=split < num_splits, other=-LIMIT)
    has_mean = means > -LIMIT
    num_means = tl.sum(has_mean.to(tl.float32), 0)
    average = tl.sum(tl.where(has_mean, means, 0.0), 0) / tl.maximum(num_means, 1.0)
    peak = peak_of(best, row, num_splits, SPLITS)
    step = tl.where(num_means > 0.0, tl.maximum(peak - average, 0.0), 0.0) / _RUNGS_ABOVE_MEAN
    lane = tl.arange(0, _RUNGS)
    rungs = tl.maximum(peak - step * (lane + 1).to(tl.float32), -LIMIT)
    return peak, tl.where(lane == _RUNGS - 1, -LIMIT, rungs)


@triton.jit
def _tally_tile(scores, pivots, weights, counts, masses):
    """Add a tile to the number and weight of scores at or above each pivot."""
    reaches = scores[None, :] >= pivots[:, None]
    return counts + reaches.to(tl.int32), masses + tl.where(reaches, weights[None, :], 0)


@triton.jit
def _lane_of(values, lane):
    """values[lane] of int64 values [16]; 0 for lane -1."""
    return tl.sum(tl.where(tl.arange(0, _RUNGS) == lane, values, 0), 0)


@triton.jit
def _bracket(setting, tally, row, vocab_size):
    """(first rung at or below every possible threshold, last rung above them or -1, counts [16], masses [16])."""
    lane = tl.arange(0, _RUNGS)
    counts = tl.load(tally + row * _TALLY + lane)
    masses = tl.load(tally + row * _TALLY + _RUNGS + lane)
    top_k = tl.load(setting + 1).to(tl.int64)
    top_p = tl.load(setting + 2)
    lower = tl.sum((counts < top_k).to(tl.int32), 0)
    least_total = _lane_of(masses, lower - 1)
    if top_k >= vocab_size:
        least_total = _lane_of(masses, _RUNGS - 1)
        lower = tl.sum((masses < tl.maximum(share_of(top_p, least_total), 1)).to(tl.int32), 0)
    upper = lower
    if top_p < 1.0:
        upper = tl.sum((masses < tl.maximum(share_of(top_p, least_total), 1)).to(tl.int32), 0)
    return lower, upper - 1, counts, masses


@triton.jit(do_not_specialize=["num_splits"])
def _ladder_kernel(
    logits,
    draws,
    searching,
    best,
    mean,
    tally,
    rungs,
    num_splits,
    vocab_size,
    split_size,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Number and weight of the tokens at or above each rung, into the tally of the row."""
    begin(PDL)
    row = tl.load(searching + tl.program_id(0)).to(tl.int32)
    inverse_temperature = tl.load(draws + row * COLUMNS).to(tl.float32)
    peak, levels = _place_rungs(best, mean, row, num_splits, SPLITS)
    lane = tl.arange(0, _RUNGS)
    if tl.program_id(1) == 0:
        # The later kernels read them: computed again, they might be rounded differently.
        tl.store(rungs + tl.program_id(0) * _RUNGS + lane, levels)
    counts = tl.zeros((_RUNGS, TILE), tl.int32)
    masses = tl.zeros((_RUNGS, TILE), tl.int64)
    start = tl.program_id(1) * split_size
    for offset in range(start, tl.minimum(start + split_size, vocab_size), TILE):
        scores = load_scores(logits, row, offset + tl.arange(0, TILE), vocab_size)
        weights = weigh(scores, peak, inverse_temperature)
        counts, masses = _tally_tile(scores, levels, weights, counts, masses)
    entry = tally + row * _TALLY + lane
    tl.atomic_add(entry, tl.sum(counts, 1).to(tl.int64), sem="relaxed")
    tl.atomic_add(entry + _RUNGS, tl.sum(masses, 1), sem="relaxed")


@triton.jit
def _gather_kernel(
    logits,
    draws,
    searching,
    tally,
    rungs,
    candidates,
    vocab_size,
    split_size,
    capacity,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The scores between the two rungs around the threshold, in any order; those beyond the capacity are left out."""
    begin(PDL)
    line = tl.program_id(0)
    row = tl.load(searching + line).to(tl.int32)
    lower, upper, _, _ = _bracket(draws + row * COLUMNS, tally, row, vocab_size)
    least = tl.load(rungs + line * _RUNGS + lower)
    bound = tl.load(rungs + line * _RUNGS + upper, mask=upper >= 0, other=float("inf"))
    start = tl.program_id(1) * split_size
    for offset in range(start, tl.minimum(start + split_size, vocab_size), TILE):
        scores = load_scores(logits, row, offset + tl.arange(0, TILE), vocab_size)
        is_candidate = (scores >= least) & (scores < bound)
        taken = is_candidate.to(tl.int32)
        num_taken = tl.sum(taken, 0)
        if num_taken > 0:
            first = tl.atomic_add(tally + row * _TALLY + 2 * _RUNGS, num_taken.to(tl.int64), sem="relaxed")
            place = first + tl.cumsum(taken, 0) - 1
            tl.store(candidates + line.to(tl.int64) * capacity + place, scores, mask=is_candidate & (place < capacity))


@triton.jit
def _key_of(scores, SPARE_BITS: tl.constexpr):
    """int32 in the order of the scores, without the bits that the logits' dtype does not have."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SPARE_BITS


@triton.jit
def _score_of(key, SPARE_BITS: tl.constexpr):
    """The score of a key, which all values of the logits' dtype survive."""
    full = (key << SPARE_BITS) | ((key >> 31) & ((1 << SPARE_BITS) - 1))
    return (full ^ ((full >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load_candidates(
    logits,
    row,
    vocab_size,
    candidates,
    num_candidates,
    fits,
    place,
):
    """One tile of the gathered scores or, where they did not fit their buffer, of the whole row."""
    if fits:
        scores = tl.load(candidates + place, mask=place < num_candidates, other=float("-inf"))
    else:
        scores = load_scores(logits, row, place, vocab_size)
    return scores


@triton.jit(do_not_specialize=["num_splits"])
def _narrow_kernel(
    logits,
    draws,
    searching,
    best,
    tally,
    rungs,
    candidates,
    thresholds,
    num_splits,
    vocab_size,
    capacity,
    SPARE_BITS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The threshold of each searching row: float32 [N].

    Twice, for top-k and then for top-p, the largest key that enough scores reach, or scores of enough weight, is
    found in an interval [low, high): enough reach `low`, too few reach `high`, and each pass tries 8 keys between.
    """
    begin(PDL)
    line = tl.program_id(0)
    row = tl.load(searching + line).to(tl.int32)
    setting = draws + row * COLUMNS
    inverse_temperature = tl.load(setting).to(tl.float32)
    top_k = tl.load(setting + 1).to(tl.int64)
    top_p = tl.load(setting + 2)
    peak = peak_of(best, row, num_splits, SPLITS)
    lower, upper, counts, masses = _bracket(setting, tally, row, vocab_size)
    least = tl.load(rungs + line * _RUNGS + lower)
    bound = tl.load(rungs + line * _RUNGS + upper, mask=upper >= 0, other=peak)
    num_candidates = tl.load(tally + row * _TALLY + 2 * _RUNGS)
    fits = num_candidates <= capacity
    num_scores = tl.where(fits, num_candidates, vocab_size)
    # What lies above the candidates counts too, unless it is among the scores already.
    base_count = tl.where(fits, _lane_of(counts, upper), 0)
    base_mass = tl.where(fits, _lane_of(masses, upper), 0)

    total = _lane_of(masses, tl.where(top_k < vocab_size, lower, _RUNGS - 1))
    low = _key_of(least, SPARE_BITS).to(tl.int64)
    above = _key_of(bound, SPARE_BITS).to(tl.int64) + 1
    pivot = tl.arange(0, _PIVOTS)
    for by_mass in range(2):
        is_active = (top_k < vocab_size).to(tl.int64) * (1 - by_mass) + (top_p < 1.0).to(tl.int64) * by_mass
        least_count = top_k * (1 - by_mass)
        least_mass = tl.maximum(share_of(top_p, total), 1) * by_mass
        high = tl.where(is_active > 0, above, low + 1)
        while high - low > 1:
            step = (high - low + _PIVOTS - 1) // _PIVOTS
            keys = low + step * (pivot + 1)
            found = tl.zeros((_PIVOTS, TILE), tl.int32)
            weight = tl.zeros((_PIVOTS, TILE), tl.int64)
            for offset in range(0, num_scores, TILE):
                place = offset + tl.arange(0, TILE)
                gathered = candidates + line.to(tl.int64) * capacity
                scores = _load_candidates(logits, row, vocab_size, gathered, num_candidates, fits, place)
                weights = weigh(scores, peak, inverse_temperature)
                found, weight = _tally_tile(_key_of(scores, SPARE_BITS).to(tl.int64), keys, weights, found, weight)
            mass = base_mass + tl.sum(weight, 1)
            reaches = (base_count + tl.sum(found, 1) >= least_count) & (mass >= least_mass)
            num_reached = tl.sum(reaches.to(tl.int32), 0)
            total = tl.where(
                (num_reached > 0) & (by_mass == 0), tl.sum(tl.where(pivot == num_reached - 1, mass, 0), 0), total
            )
            high = tl.minimum(high, low + step * (num_reached + 1))
            low += step * num_reached
    floor = peak + tl.load(setting + 3).to(tl.float32)
    tl.store(thresholds + row, tl.maximum(_score_of(low.to(tl.int32), SPARE_BITS), floor))


def find_thresholds(logits: torch.Tensor, settings: StepSettings, measured: Measured) -> torch.Tensor:
    """The smallest kept logit of the searching rows of logits [N, V]; float32 [N], other rows undefined."""
    num_rows, vocab_size = logits.shape
    num_searching = len(settings.searching)
    device = logits.device
    num_splits = measured.best.shape[1]
    splits = padded_splits(num_splits)
    options = {"PDL": supports_pdl(device), **pdl_options(device)}
    draws, searching, best, tally = settings.draws, settings.searching, measured.best, measured.tally
    rungs = torch.empty((num_searching, _RUNGS.value), dtype=torch.float32, device=device)
    capacity = min(vocab_size, max(vocab_size // 4, _LEAST_CAPACITY))
    candidates = torch.empty((num_searching, capacity), dtype=torch.float32, device=device)
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=device)

    num_programs, split_size = split_vocabulary(num_searching, vocab_size, _LADDER_SPLIT, device)
    _ladder_kernel[(num_searching, num_programs)](
        logits,
        draws,
        searching,
        best,
        measured.mean,
        tally,
        rungs,
        num_splits,
        vocab_size,
        split_size,
        TILE=_LADDER_TILE,
        SPLITS=splits,
        num_warps=4,
        **options,
    )
    num_programs, split_size = split_vocabulary(num_searching, vocab_size, _GATHER_TILE, device)
    _gather_kernel[(num_searching, num_programs)](
        logits,
        draws,
        searching,
        tally,
        rungs,
        candidates,
        vocab_size,
        split_size,
        capacity,
        TILE=_GATHER_TILE,
        num_warps=4,
        **options,
    )
    _narrow_kernel[(num_searching,)](
        logits,
        draws,
        searching,
        best,
        tally,
        rungs,
        candidates,
        thresholds,
        num_splits,
        vocab_size,
        capacity,
        SPARE_BITS=_SPARE_BITS[logits.dtype],
        TILE=_NARROW_TILE,
        SPLITS=splits,
        num_warps=16,
        **options,
    )
    return thresholds

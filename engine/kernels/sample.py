"""Draws tokens on the device: three launches without top-k and top-p, six with them.

    measure    largest logit of every row
    (search    the threshold of top-k and top-p: `engine.kernels.threshold`)
    weigh      weight of the kept tokens of each chunk of the vocabulary
    choose     the chunk, then the token in it, at which the row's uniform number falls

The definitions are those of `engine.sampling.filters`, its torch counterpart.  Weights are whole numbers,
so their sums are exact and the split of the vocabulary over programs cannot change a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.greedy import padded_splits, split_vocabulary, unpack_index
from engine.kernels.launch import pdl_options, supports_pdl
from engine.kernels.scores import COLUMNS, begin, load_scores, measure, peak_of, share_of, weigh
from engine.kernels.threshold import find_thresholds
from engine.sampling.settings import StepSettings

_CHUNK = 1024


@triton.jit(do_not_specialize=["num_splits"])
def _weigh_kernel(
    logits,
    draws,
    best,
    thresholds,
    chunk_weights,
    num_splits,
    vocab_size,
    split_size,
    num_chunks,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weight of the kept tokens of each chunk: int64 [N, num_chunks]."""
    begin(PDL)
    row = tl.program_id(0)
    setting = draws + row * COLUMNS
    inverse_temperature = tl.load(setting).to(tl.float32)
    if inverse_temperature > 0.0:
        peak, threshold = _kept_range(setting, best, thresholds, row, num_splits, SPLITS)
        start = tl.program_id(1) * split_size
        for offset in range(start, tl.minimum(start + split_size, vocab_size), CHUNK):
            scores = load_scores(logits, row, offset + tl.arange(0, CHUNK), vocab_size)
            weights = tl.where(scores >= threshold, weigh(scores, peak, inverse_temperature), 0)
            tl.store(chunk_weights + row * num_chunks + offset // CHUNK, tl.sum(weights, 0))


@triton.jit(do_not_specialize=["num_splits"])
def _choose_kernel(
    logits,
    draws,
    best,
    thresholds,
    chunk_weights,
    token_ids,
    num_splits,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of each row: int64 [N]."""
    begin(PDL)
    row = tl.program_id(0)
    setting = draws + row * COLUMNS
    inverse_temperature = tl.load(setting).to(tl.float32)
    if inverse_temperature > 0.0:
        peak, threshold = _kept_range(setting, best, thresholds, row, num_splits, SPLITS)
        index = tl.arange(0, CHUNKS)
        of_chunk = tl.load(chunk_weights + row * num_chunks + index, mask=index < num_chunks, other=0)
        until_chunk = tl.cumsum(of_chunk, 0)
        target = share_of(tl.load(setting + 4), tl.sum(of_chunk, 0))
        # The first chunk, then the first token of it, whose cumulative weight exceeds the target.
        chunk = tl.sum((until_chunk <= target).to(tl.int32), 0)
        target -= tl.sum(tl.where(index < chunk, of_chunk, 0), 0)
        scores = load_scores(logits, row, chunk * CHUNK + tl.arange(0, CHUNK), vocab_size)
        weights = tl.where(scores >= threshold, weigh(scores, peak, inverse_temperature), 0)
        token = chunk * CHUNK + tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
        tl.store(token_ids + row, tl.minimum(token, vocab_size - 1))
    else:
        split = tl.arange(0, SPLITS)
        bests = tl.load(best + row * num_splits + split, mask=split < num_splits, other=-0x7FFFFFFFFFFFFFFF)
        tl.store(token_ids + row, unpack_index(tl.max(bests, 0)))


@triton.jit
def _kept_range(
    setting,
    best,
    thresholds,
    row,
    num_splits,
    SPLITS: tl.constexpr,
):
    """(largest logit, smallest kept logit) of a row that draws."""
    peak = peak_of(best, row, num_splits, SPLITS)
    floor = peak + tl.load(setting + 3).to(tl.float32)
    is_searching = tl.load(setting + 5) > 0.0
    found = tl.load(thresholds + row, mask=is_searching, other=0.0)
    return peak, tl.where(is_searching, found, floor)


def choose(logits: torch.Tensor, settings: StepSettings) -> torch.Tensor:
    """One token id for every row of logits [N, V]: the likeliest of greedy rows, a drawn one of others; int64 [N]."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    options = {"PDL": supports_pdl(device), **pdl_options(device)}
    measured = measure(logits)
    best, num_splits = measured.best, measured.best.shape[1]
    splits = padded_splits(num_splits)
    # Read for rows that search alone.
    thresholds = find_thresholds(logits, settings, measured) if len(settings.searching) else best
    num_programs, split_size = split_vocabulary(num_rows, vocab_size, _CHUNK, device)
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    chunk_weights = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=device)
    _weigh_kernel[(num_rows, num_programs)](
        logits,
        settings.draws,
        best,
        thresholds,
        chunk_weights,
        num_splits,
        vocab_size,
        split_size,
        num_chunks,
        CHUNK=_CHUNK,
        SPLITS=splits,
        num_warps=4,
        **options,
    )
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    _choose_kernel[(num_rows,)](
        logits,
        settings.draws,
        best,
        thresholds,
        chunk_weights,
        token_ids,
        num_splits,
        vocab_size,
        num_chunks,
        CHUNK=_CHUNK,
        CHUNKS=triton.next_power_of_2(num_chunks),
        SPLITS=splits,
        num_warps=4,
        **options,
    )
    return token_ids

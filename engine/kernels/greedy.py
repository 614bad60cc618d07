"""The likeliest token of every row, and its place in the row table: the end of every decode step.

Two small kernels: the vocabulary is split over programs, then one program per row combines their
results.  `greedy_append` is captured in the decode graphs; `likeliest` serves the sampler.  Among equal
logits the lowest id wins; NaN counts as minus infinity.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import num_multiprocessors, pdl_options, supports_pdl

_TILE = 2048
_PROGRAMS_PER_MULTIPROCESSOR = 8
_MAX_SPLITS = 1024
_LEAST_PADDED_SPLITS = 128


@triton.jit
def pack_best(value, index):
    """int64 whose order is that of the float32 values, then of falling indices: (monotone image, ~index)."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def unpack_index(best):
    return 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def unpack_value(best):
    key = (best >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best_of_split_kernel(
    logits,
    best,
    vocab_size,
    split_size,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    split = tl.program_id(1)
    line = logits + row.to(tl.int64) * vocab_size
    start = split * split_size
    lane = tl.arange(0, TILE)
    largest = tl.full((TILE,), float("-inf"), tl.float32)
    index = start + lane
    for offset in range(start, tl.minimum(start + split_size, vocab_size), TILE):
        token = offset + lane
        value = tl.load(line + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        # False for NaN, which so never wins.
        is_larger = value > largest
        largest = tl.where(is_larger, value, largest)
        index = tl.where(is_larger, token, index)
    top = tl.max(largest, 0)
    first = tl.min(tl.where(largest == top, index, 0x7FFFFFFF), 0)
    tl.store(best + row * tl.num_programs(1) + split, pack_best(top, first))


@triton.jit(do_not_specialize=["num_splits"])
def _best_of_row_kernel(
    best,
    token_ids,
    num_splits,
    rows,
    positions,
    token_table,
    row_length,
    SPLITS: tl.constexpr,
    APPENDS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    bests = tl.load(best + sequence * num_splits + split, mask=split < num_splits, other=-0x7FFFFFFFFFFFFFFF)
    token_id = unpack_index(tl.max(bests, 0))
    tl.store(token_ids + sequence, token_id)
    if APPENDS:
        row = tl.load(rows + sequence).to(tl.int64)
        end = tl.load(positions + sequence).to(tl.int64) + 1
        tl.store(token_table + row * row_length + end, token_id, mask=(row >= 0) & (end < row_length))


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """argmax of each row: logits [N, V] in any floating dtype, contiguous -> int64 [N]."""
    token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _find_best(logits, token_ids)
    return token_ids


def greedy_append(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    token_table: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write argmax(logits[b]) to out[b] and to token_table[rows[b], positions[b] + 1].

    logits [B, V] in any floating dtype, contiguous; rows, positions int32 [B]; token_table int32 [R, L];
    out int32 or int64 [B].  The table is left alone where rows[b] < 0 or the position lies beyond the line.
    """
    _find_best(logits, out, (rows, positions, token_table))


def split_vocabulary(num_rows: int, vocab_size: int, tile: int, device: torch.device) -> tuple[int, int]:
    """(number of splits, tokens per split): whole tiles, enough splits to fill the device, not many more."""
    num_tiles = -(-vocab_size // tile)
    wanted_programs = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device)
    tiles_per_split = max(-(-num_rows * num_tiles // wanted_programs), -(-num_tiles // _MAX_SPLITS))
    return -(-num_tiles // tiles_per_split), tiles_per_split * tile


def padded_splits(num_splits: int) -> int:
    """A power of two that holds the splits; nearly always the same, so that kernels are compiled once."""
    return max(_LEAST_PADDED_SPLITS, 1 << (num_splits - 1).bit_length())


def _find_best(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    destination: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    assert logits.is_contiguous()
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    device = logits.device
    num_splits, split_size = split_vocabulary(num_rows, vocab_size, _TILE, device)
    best = torch.empty((num_rows, num_splits), dtype=torch.int64, device=device)
    options = {"PDL": supports_pdl(device), **pdl_options(device)}
    _best_of_split_kernel[(num_rows, num_splits)](
        logits, best, vocab_size, split_size, TILE=_TILE, num_warps=4, **options
    )
    # Without a destination its arguments are never read; any tensor will do.
    rows, positions, token_table = destination or (best, best, token_ids)
    _best_of_row_kernel[(num_rows,)](
        best,
        token_ids,
        num_splits,
        rows,
        positions,
        token_table,
        token_table.shape[-1],
        SPLITS=padded_splits(num_splits),
        APPENDS=destination is not None,
        num_warps=1,
        **options,
    )

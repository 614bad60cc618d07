"""Batch preparation as a kernel equals its torch reference, for decodes, chunks and padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kernels.gather import gather_with_torch
from engine.kernels.gather_step import gather_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("starts", "lengths", "padded"),
    [([0], [1], 0), ([5, 0, 99], [1, 1, 1], 2), ([7, 0, 31, 600], [1, 300, 257, 40], 0), ([3], [1], 7)],
)
def test_equals_torch(block_size: int, starts: list[int], lengths: list[int], padded: int) -> None:
    generator = torch.Generator().manual_seed(0)
    token_table = torch.randint(1000, (8, 700), generator=generator, dtype=torch.int32)
    block_tables = torch.randint(1 << 20, (8, 44), generator=generator, dtype=torch.int32)
    rows = np.random.default_rng(0).permutation(8)[: len(starts)]
    columns = [*zip(rows, starts, lengths, strict=True), *[(-1, 0, 1)] * padded]
    table = np.array(columns, dtype=np.int32).T
    firsts = np.cumsum(table[2]) - table[2]
    sequences = torch.from_numpy(np.ascontiguousarray(np.vstack((table, firsts[None])), dtype=np.int32))
    num_tokens = int(table[2].sum())

    expected = gather_with_torch(sequences, token_table, block_tables, block_size, num_tokens)
    found = gather_step(sequences.to(DEVICE), token_table.to(DEVICE), block_tables.to(DEVICE), block_size, num_tokens)
    for name, ours, reference in zip(expected._fields, found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), reference, atol=0, rtol=0, msg=name)

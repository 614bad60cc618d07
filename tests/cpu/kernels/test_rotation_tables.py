"""The rotation kernel against torch, at positions where a careless cosine is already far off."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.rotation_tables import rotation_tables
from engine.layers.rotary import RopeConfig, inverse_frequencies, tables_with_torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_equals_torch(head_dim: int) -> None:
    frequencies = inverse_frequencies(RopeConfig(kind="default", theta=5e5, head_dim=head_dim))
    positions = torch.tensor([0, 1, 17, 4095, 131071], dtype=torch.int32)
    found = rotation_tables(positions.to(DEVICE), frequencies.to(DEVICE), 1.25)
    for table, expected in zip(found, tables_with_torch(positions, frequencies, 1.25), strict=True):
        torch.testing.assert_close(table.cpu(), expected, atol=2e-6, rtol=1e-6)

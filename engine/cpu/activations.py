"""How activations lie in memory between kernels: sizes that the kernels and whoever records them agree on.

Imports no compiler: recording a step needs none.
"""

from __future__ import annotations

from engine.cpu.isa import host_isa

LANES = 16
"""Numbers in a vector, and outputs in a tile of weights."""

GROUP = 32
"""Inputs that share a scale, where activations and weights are quantised."""
ACTIVATION_BYTES = GROUP + 4 + 4
"""What one row of quantised activations takes per group: codes, scale, scaled sum."""

FLOAT_GROUP = LANES
"""Inputs that float activations hold side by side; the width of a matrix must be a multiple."""
FLOAT_ACTIVATION_BYTES = 4 * FLOAT_GROUP
"""What one row of float activations takes per group."""


def max_block_rows() -> int:
    """The height of a block of rows in a step of many rows (`engine.cpu.row_blocks`)."""
    isa = host_isa()
    assert isa is not None, "this processor is not served"
    return isa.tile_rows


def packed_row_bytes(columns: int) -> int:
    """What one row of quantised activations takes."""
    return -(-columns // GROUP) * ACTIVATION_BYTES


def float_row_bytes(columns: int) -> int:
    """What one row of float activations takes."""
    return columns // FLOAT_GROUP * FLOAT_ACTIVATION_BYTES

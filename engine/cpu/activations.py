"""How activations lie in memory between kernels: sizes that the kernels and whoever records them agree on.

Imports no compiler: recording a step needs none.
"""

from __future__ import annotations

from engine.cpu.isa import host_isa

LANES = 16
"""Numbers in a vector, and outputs in a tile of weights."""

GROUP = 32
"""Inputs that share a scale, where activations and weights are quantised."""
SCALE, SCALED_SUM, START_4, START_8 = range(4)
"""The numbers of a group beside its codes, for each row of a block side by side: the scale; scale · the sum of the
codes; and what sums of products with symmetric codes of 4 and of 8 bits start from (`engine.cpu.matrix_tile`)."""
ACTIVATION_BYTES = GROUP + 4 * 4
"""What one row of quantised activations takes per group."""

EXACT = 1.5 * 2.0**23
EXACT_BITS = 0x4B40_0000
"""A float32 and its bits: these plus a whole number below 2^22 are the bits of the sum of both."""

FLOAT_GROUP = LANES
"""Inputs that float activations hold side by side; the width of a matrix must be a multiple."""
FLOAT_ACTIVATION_BYTES = 4 * FLOAT_GROUP
"""What one row of float activations takes per group."""


def max_block_rows() -> int:
    """The height of a block of rows in a step of many rows (`engine.cpu.row_blocks`)."""
    isa = host_isa()
    assert isa is not None, "this processor is not served"
    return isa.tile_rows


def uses_amx() -> bool:
    """Whether tall tiles of quantised weights are multiplied by the processor's unit for that."""
    isa = host_isa()
    assert isa is not None, "this processor is not served"
    return isa.has_amx


def splits_floats() -> bool:
    """Whether an encoder's products are of numbers in two halves of bfloat16, by the processor's unit for those."""
    isa = host_isa()
    assert isa is not None, "this processor is not served"
    return isa.has_amx_floats


def packed_row_bytes(columns: int) -> int:
    """What one row of quantised activations takes."""
    return -(-columns // GROUP) * ACTIVATION_BYTES


def float_row_bytes(columns: int) -> int:
    """What one row of float activations takes."""
    return columns // FLOAT_GROUP * FLOAT_ACTIVATION_BYTES

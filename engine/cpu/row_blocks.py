"""How rows of activations are grouped into blocks, each the height of a matrix tile.

All blocks of a step have the same height: the smallest power of two that holds all rows, and at most what the
processor's registers hold.  Kernels that write packed activations and the one that reads them agree through this.
"""

from __future__ import annotations

import numba

from engine.cpu.activations import ACTIVATION_BYTES, GROUP


@numba.njit(error_model="numpy")
def block_rows(num_rows, most):
    """The height of the blocks of a step of `num_rows`, at most `most` (`engine.cpu.activations.max_block_rows`)."""
    height = 1
    while height < num_rows and height < most:
        height *= 2
    return height


@numba.njit(error_model="numpy")
def group_place(packed, row, group, num_groups, height):
    """Addresses of one row's codes and first number for one group, in packed activations.

    The next number lies 4 · height bytes further.
    """
    block, lane = row // height, row % height
    record = packed + (block * num_groups + group) * height * ACTIVATION_BYTES
    return record + lane * GROUP, record + height * GROUP + 4 * lane

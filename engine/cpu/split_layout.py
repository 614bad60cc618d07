"""How numbers in two halves of bfloat16 lie in memory: sizes that kernels and whoever records them agree on.

Imports no compiler.
"""

from __future__ import annotations

GROUP_INPUTS = 32
"""Inputs that are multiplied at once."""
TILE_OUTPUTS = 32
"""Outputs of a tile of products: those of two tiles of weights."""
ROW_BYTES = 64
SQUARE_BYTES = 1024
"""One register of the unit: sixteen rows of 32 bfloat16."""
GROUP_BYTES = 2 * SQUARE_BYTES
"""The high and low parts of sixteen rows, or outputs, of one group."""

PANEL_ROW_BYTES = 4 * TILE_OUTPUTS
"""Rows of queries, keys and values come in panels of 32 float32, all rows of a panel end to end: a head then reads
memory in order, and not some lines of each page."""

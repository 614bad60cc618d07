"""The matrix product in split numbers as a kernel: packed activations times one `SplitMatrix`, plus a bias.

Pieces of some rows by some outputs are claimed, so small that their activations and weights stay in a second-level
cache.  Recorded by `engine.cpu.encoder_ops`.
"""

from __future__ import annotations

from engine.cpu.activations import LANES
from engine.cpu.kernel import Body
from engine.cpu.memory import claim, int64s, read_arguments
from engine.cpu.split_emit import close_squares, open_squares
from engine.cpu.split_layout import GROUP_BYTES, TILE_OUTPUTS
from engine.cpu.split_tile import split_tile

_CHUNK_BYTES = 1 << 19
"""The most weights of a piece."""
_PIECE_ROWS = 8 * LANES
"""Rows of a piece: with few, the weights would be read from further away too often."""


def split_matrix(has_gelu: bool) -> Body:
    """Arguments: activations, weights, bias, output and its stride, bytes from one tile of 32 outputs to the next,
    groups, tiles, which step number counts rows.

    With GELU the output is packed activations, and its stride is that of a block of sixteen rows.
    """
    is_packed = int(has_gelu)

    def kernel(arguments, step, rank, size):
        numbers = read_arguments(arguments, 9)
        activations, weights, bias, output, stride, distance, groups, num_tiles, rows_at = numbers
        num_rows = int64s(step, 8)[rows_at]
        block_bytes = groups * GROUP_BYTES
        tile_bytes = 2 * block_bytes
        chunk = max(1, min(_CHUNK_BYTES // tile_bytes, num_tiles // size))
        num_chunks = (num_tiles + chunk - 1) // chunk
        num_spans = (num_rows + _PIECE_ROWS - 1) // _PIECE_ROWS
        piece = claim(arguments)
        if piece < num_chunks * num_spans:
            open_squares()
        else:
            return
        while piece < num_chunks * num_spans:
            first, start = piece // num_spans * chunk, piece % num_spans * _PIECE_ROWS
            last, end = min(first + chunk, num_tiles), min(start + _PIECE_ROWS, num_rows)
            for row in range(start, end, 2 * LANES):
                block = row // LANES
                values = activations + block * block_bytes
                for tile in range(first, last):
                    matrix = weights + tile * tile_bytes
                    added = bias + tile * TILE_OUTPUTS * 4
                    place = output + (block if is_packed else row) * stride + tile * distance
                    # How many blocks a tile has is a constant to the compiler.
                    if end - row > LANES:
                        split_tile(2, is_packed, values, matrix, added, place, stride, groups)
                    else:
                        split_tile(1, is_packed, values, matrix, added, place, stride, groups)
            piece = claim(arguments)
        close_squares()

    return kernel

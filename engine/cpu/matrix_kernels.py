"""The matrix product as a kernel: packed activations times one packed matrix, plus a bias.

Tiles of outputs are claimed in chunks; each thread multiplies a chunk with all rows, block by block, so that
the chunk's weights are read from memory once.  Recorded by `engine.cpu.ops`.
"""

from __future__ import annotations

from engine.cpu.activations import ACTIVATION_BYTES, LANES
from engine.cpu.amx_tile import MIN_AMX_ROWS, close_amx, open_amx
from engine.cpu.kernel import Body
from engine.cpu.matrix_tile import matrix_tile
from engine.cpu.memory import claim, int64s, read_arguments
from engine.cpu.row_blocks import block_rows
from engine.cpu.weight_record import weight_bytes

_TILE_BYTES = 4 * LANES
_CHUNKS_PER_THREAD = 2
_CHUNK_BYTES = 1 << 19
"""The most weights a chunk has, so that they stay in a second-level cache."""


def matrix(bits: int, is_symmetric: bool, most_rows: int, has_amx: bool) -> Body:
    """Arguments: activations, weights, bias, output and its stride, groups, tiles, which step number counts rows."""
    symmetric, amx = int(is_symmetric), int(has_amx)
    group_bytes = weight_bytes(bits, is_symmetric)

    def kernel(arguments, step, rank, size):
        activations, weights, bias, output, stride, groups, num_tiles, rows_at = read_arguments(arguments, 8)
        num_rows = int64s(step, 8)[rows_at]
        height = block_rows(num_rows, most_rows)
        tile_bytes = groups * group_bytes
        chunk = max(1, min(num_tiles // (size * _CHUNKS_PER_THREAD), _CHUNK_BYTES // tile_bytes))
        if height >= MIN_AMX_ROWS:
            open_amx(amx, height)
        first = claim(arguments) * chunk
        while first < num_tiles:
            for row in range(0, num_rows, height):
                block = activations + row * groups * ACTIVATION_BYTES
                for tile in range(first, min(first + chunk, num_tiles)):
                    values = weights + tile * tile_bytes
                    added = bias + tile * _TILE_BYTES
                    place = output + row * stride + tile * _TILE_BYTES
                    # A tile's height and bits are constants to the compiler.
                    if height == 1:
                        matrix_tile(1, bits, symmetric, amx, block, values, added, place, stride, groups)
                    elif height == 2:
                        matrix_tile(2, bits, symmetric, amx, block, values, added, place, stride, groups)
                    elif height == 4:
                        matrix_tile(4, bits, symmetric, amx, block, values, added, place, stride, groups)
                    elif most_rows > 4 and height == 8:
                        matrix_tile(8, bits, symmetric, amx, block, values, added, place, stride, groups)
                    elif most_rows > 4:
                        matrix_tile(16, bits, symmetric, amx, block, values, added, place, stride, groups)
            first = claim(arguments) * chunk
        if height >= MIN_AMX_ROWS:
            close_amx(amx)

    return kernel

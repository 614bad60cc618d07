"""The first instruction of attention in a step: which tiles there are, shared by all layers.

A tile is some tokens of one sequence, for all KV heads.  Where tiles are too few to keep all threads at work, those
of long contexts are split: each chunk of the context becomes a piece of its own, and whoever ends the last one merges
them.  Results are the same, split or not.  Recorded by `engine.attention.compiled_paged`.
"""

from __future__ import annotations

from engine.cpu.attention_shape import (
    CHUNK_TOKENS,
    HEADER_BYTES,
    NUM_PIECES,
    PIECE_CHUNK,
    PIECE_FIELDS,
    PIECE_FIRST,
    PIECE_PARTIAL,
    PIECE_ROW,
    PIECE_START,
    PIECE_TOKENS,
)
from engine.cpu.kernel import Body
from engine.cpu.memory import claim, int32s, int64s, read_arguments
from engine.cpu.step import NUM_SEQUENCES

_TILES_PER_THREAD = 8
"""Fewer tiles times KV heads than this, and threads would wait for the one with the longest context."""


def plan_attention(tile_tokens: int) -> Body:
    """Arguments: sequences, plan, tiles that one piece stands for (KV heads times slabs), states of pieces there are
    room for.  The first thread to come does it."""

    def kernel(arguments, step, rank, size):
        if claim(arguments) != 0:
            return
        sequences, plan, tiles_per_piece, room = read_arguments(arguments, 4)
        num_sequences = int64s(step, 8)[NUM_SEQUENCES]
        records = int32s(sequences, (num_sequences, 4))
        num_tiles = 0
        for sequence in range(num_sequences):
            num_tiles += (records[sequence, 2] + tile_tokens - 1) // tile_tokens
        splits = size > 1 and num_tiles * tiles_per_piece < size * _TILES_PER_THREAD
        num_pieces = 0
        num_partials = 0
        # Prompts come last in a step, and the end of a prompt is the most work: begin with it.
        for sequence in range(num_sequences - 1, -1, -1):
            row, start = records[sequence, 0], records[sequence, 1]
            count, first = records[sequence, 2], records[sequence, 3]
            for tile in range((count + tile_tokens - 1) // tile_tokens - 1, -1, -1):
                token = tile * tile_tokens
                tokens = min(tile_tokens, count - token)
                num_chunks = (start + token + tokens + CHUNK_TOKENS - 1) // CHUNK_TOKENS
                is_split = splits and num_chunks > 1 and num_partials + num_chunks <= room
                for chunk in range(num_chunks if is_split else 1):
                    piece = int32s(plan + HEADER_BYTES + 4 * PIECE_FIELDS * num_pieces, PIECE_FIELDS)
                    piece[PIECE_ROW] = row
                    piece[PIECE_FIRST] = first + token
                    piece[PIECE_TOKENS] = tokens
                    piece[PIECE_START] = start + token
                    piece[PIECE_CHUNK] = chunk if is_split else -1
                    piece[PIECE_PARTIAL] = num_partials
                    num_pieces += 1
                if is_split:
                    num_partials += num_chunks
        int64s(plan, 1)[NUM_PIECES] = num_pieces

    return kernel

"""Kernels that move and look up rows: what a step begins and ends with.

`gather` turns the sequences of a step into tokens, positions and slots; `embed_packed` looks tokens up;
`rotation_tables` gives their angles; `select_rows` picks the rows that sample; `likeliest` their best tokens.
Recorded by `engine.cpu.ops` and `engine.runner.recorded_steps`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu import step as numbers_of_step
from engine.cpu.activations import GROUP, LANES
from engine.cpu.kernel import Body
from engine.cpu.lanes import FLOATS, Emitter, Lanes, Loop
from engine.cpu.memory import claim, float32s, int32s, int64s, load_half, read_arguments, uint8s
from engine.cpu.weight_record import weight_bytes

NUM_TOKENS, NUM_SEQUENCES, NUM_SAMPLES = (
    numbers_of_step.NUM_TOKENS,
    numbers_of_step.NUM_SEQUENCES,
    numbers_of_step.NUM_SAMPLES,
)


def gather(block_size: int) -> Body:
    """Arguments: sequences, row token ids and their stride, block tables and their stride, then what is written:
    token ids, positions, slots.  One thread does it, a microsecond for a hundred tokens."""

    def kernel(arguments, step, rank, size):
        if claim(arguments) != 0:
            return
        sequences, known, known_stride, tables, table_stride, ids, places, slots = read_arguments(arguments, 8)
        num_sequences = int64s(step, 8)[NUM_SEQUENCES]
        num_tokens = int64s(step, 8)[NUM_TOKENS]
        records = int32s(sequences, (num_sequences, 4))
        token_ids, positions = int32s(ids, num_tokens), int32s(places, num_tokens)
        slot_mapping = int64s(slots, num_tokens)
        for sequence in range(num_sequences):
            row, start = np.int64(records[sequence, 0]), records[sequence, 1]
            count, first = records[sequence, 2], records[sequence, 3]
            row_tokens = int32s(known + row * known_stride, start + count)
            table = int32s(tables + row * table_stride, (start + count) // block_size + 1)
            for index in range(count):
                position = start + index
                token_ids[first + index] = row_tokens[position]
                positions[first + index] = position
                block = np.int64(table[position // block_size])
                slot_mapping[first + index] = block * block_size + position % block_size

    return kernel


def embed_packed(bits: int, is_symmetric: bool) -> Body:
    """Rows of a packed matrix.  Arguments: token ids, weights, groups, output and its stride."""
    group_bytes = weight_bytes(bits, is_symmetric)
    zero = 1 << (bits - 1)
    code_bytes = LANES * GROUP * bits // 8

    def kernel(arguments, step, rank, size):
        ids, weights, num_groups, output, stride = read_arguments(arguments, 5)
        num_tokens = int64s(step, 8)[NUM_TOKENS]
        token_ids = int32s(ids, num_tokens)
        token = claim(arguments)
        while token < num_tokens:
            row = np.int64(token_ids[token])
            lane = row % LANES
            values = float32s(output + token * stride, num_groups * GROUP)
            for group in range(num_groups):
                record = weights + (row // LANES * num_groups + group) * group_bytes
                codes = uint8s(record, code_bytes)
                scale = load_half(record + code_bytes + 2 * lane)
                minimum = -scale * np.float32(zero)
                if not is_symmetric:
                    minimum = load_half(record + code_bytes + 2 * (LANES + lane))
                for index in range(GROUP):
                    quad = index // 4
                    if bits == 8:
                        code = codes[(quad * LANES + lane) * 4 + index % 4]
                    else:
                        both = codes[(quad % 4 * LANES + lane) * 4 + index % 4]
                        code = both & 15 if quad < 4 else both >> 4
                    values[group * GROUP + index] = scale * np.float32(code) + minimum
            token = claim(arguments)

    return kernel


def rotation() -> Body:
    """Arguments: positions, radians per position float32 [pairs], scale as float32 bits, pairs, then what is
    written: cos and sin with their common stride."""

    def kernel(arguments, step, rank, size):
        places, frequencies, _, num_pairs, cos, sin, stride = read_arguments(arguments, 7)
        scale = float32s(arguments + 8 * 3, 1)[0]
        num_tokens = int64s(step, 8)[NUM_TOKENS]
        positions = int32s(places, num_tokens)
        radians = float32s(frequencies, num_pairs)
        token = claim(arguments)
        while token < num_tokens:
            cosines = float32s(cos + token * stride, num_pairs)
            sines = float32s(sin + token * stride, num_pairs)
            position = np.float32(positions[token])
            for pair in range(num_pairs):
                angle = position * radians[pair]
                cosines[pair] = np.float32(math.cos(angle)) * scale
                sines[pair] = np.float32(math.sin(angle)) * scale
            token = claim(arguments)

    return kernel


def add() -> Body:
    """Arguments: left and right with their strides, the sum and its stride, columns, which step number counts rows."""

    def kernel(arguments, step, rank, size):
        left, left_stride, right, right_stride, total, total_stride, columns, rows_at = read_arguments(arguments, 8)
        num_rows = int64s(step, 8)[rows_at]
        row = claim(arguments)
        while row < num_rows:
            lefts = float32s(left + row * left_stride, columns)
            rights = float32s(right + row * right_stride, columns)
            totals = float32s(total + row * total_stride, columns)
            for column in range(columns):
                totals[column] = lefts[column] + rights[column]
            row = claim(arguments)

    return kernel


def select_rows() -> Body:
    """Arguments: sample records, source and its stride, output and its stride, columns."""

    def kernel(arguments, step, rank, size):
        samples, source, stride, output, output_stride, columns = read_arguments(arguments, 6)
        num_samples = int64s(step, 8)[NUM_SAMPLES]
        records = int32s(samples, (num_samples, 2))
        sample = claim(arguments)
        while sample < num_samples:
            values = float32s(source + np.int64(records[sample, 0]) * stride, columns)
            chosen = float32s(output + sample * output_stride, columns)
            for column in range(columns):  # assigning a slice takes ten times as long to compile
                chosen[column] = values[column]
            sample = claim(arguments)

    return kernel


@intrinsic
def _largest(typing_context: Any, values: Any, num_vectors: Any) -> tuple[Any, Any]:
    """The largest of 16 · `num_vectors` float32; NaN counts as nothing."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder)
        loop = Loop(emit, arguments[1], [arguments[0], ir.Constant(FLOATS, [-math.inf] * LANES)])
        place, peaks = loop.values
        larger = emit.load_floats(place).maximum(Lanes(emit, peaks))
        peaks = loop.close([emit.at(place, 4 * LANES), larger.value])[1]
        return Lanes(emit, peaks).largest()

    return types.float32(types.int64, types.int64), generate


def likeliest() -> Body:
    """The first of the largest scores of every sample, which becomes the next token of its row.

    Arguments: scores and their stride, columns, output int64 [N], sample records, positions, row token ids, their
    stride and number per row.
    """

    def kernel(arguments, step, rank, size):
        scores, stride, columns, output, samples, places, known, known_stride, row_length = read_arguments(arguments, 9)
        num_samples = int64s(step, 8)[NUM_SAMPLES]
        records = int32s(samples, (num_samples, 2))
        positions = int32s(places, int64s(step, 8)[NUM_TOKENS])
        token_ids = int64s(output, num_samples)
        whole = columns // LANES
        sample = claim(arguments)
        while sample < num_samples:
            values = float32s(scores + sample * stride, columns)
            peak = _largest(scores + sample * stride, whole) if whole else np.float32(-np.inf)
            for column in range(whole * LANES, columns):
                peak = max(peak, values[column])
            best = 0
            while best < columns - 1 and values[best] != peak:
                best += 1
            token_ids[sample] = best
            index, row = np.int64(records[sample, 0]), np.int64(records[sample, 1])
            position = positions[index] + 1
            if position < row_length:
                int32s(known + row * known_stride, row_length)[position] = best
            sample = claim(arguments)

    return kernel

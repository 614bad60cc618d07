"""Pooling as a kernel: one vector per text from the hidden states of its tokens.

Recorded by `engine.runner.recorded_encoder`.
"""

from __future__ import annotations

import numpy as np

from engine.cpu.kernel import Body
from engine.cpu.memory import claim, float32s, int32s, int64s, read_arguments
from engine.cpu.ragged_shape import POOLING_MODES
from engine.cpu.step import NUM_SEQUENCES, SEQUENCE_FIELDS, SEQUENCE_FIRST, SEQUENCE_TOKENS


def pool(mode: int) -> Body:
    """Arguments: sequences, hidden and its stride, output and its stride, columns.

    `mode` is a place in `engine.cpu.ragged_shape.POOLING_MODES`.
    """
    is_mean, is_last = POOLING_MODES[mode] == "mean", POOLING_MODES[mode] == "last"

    def kernel(arguments, step, rank, size):
        sequences, hidden, stride, output, output_stride, columns = read_arguments(arguments, 6)
        num_sequences = int64s(step, 8)[NUM_SEQUENCES]
        records = int32s(sequences, (num_sequences, SEQUENCE_FIELDS))
        sequence = claim(arguments)
        while sequence < num_sequences:
            count, first = np.int64(records[sequence, SEQUENCE_TOKENS]), np.int64(records[sequence, SEQUENCE_FIRST])
            begin = first + count - 1 if is_last else first
            end = first + count if is_mean else begin + 1
            pooled = float32s(output + sequence * output_stride, columns)
            for column in range(columns):
                pooled[column] = np.float32(0.0)
            for token in range(begin, end):
                values = float32s(hidden + token * stride, columns)
                for column in range(columns):
                    pooled[column] += values[column]
            factor = np.float32(1.0) / np.float32(end - begin)
            for column in range(columns):
                pooled[column] *= factor
            sequence = claim(arguments)

    return kernel

"""The numbers of one step that kernels read: int64 each, at these places from the step's address.

Everything else a kernel needs is fixed when the program is recorded and lies in its arguments.
Written by `engine.runner.recorded_steps`.
"""

from __future__ import annotations

NUM_TOKENS = 0
"""T, tokens computed in this step, all sequences end to end."""
NUM_SAMPLES = 1
"""N, rows of logits."""
NUM_SEQUENCES = 2
"""S."""
NUM_DECODES = 3
"""The first sequences that compute one token each."""

STEP_SIZE = 8

SEQUENCE_ROW = 0
SEQUENCE_START = 1
SEQUENCE_TOKENS = 2
SEQUENCE_FIRST = 3
SEQUENCE_FIELDS = 4
"""A sequence is four int32: its row in the row table, the position of its first token in this step, how many
tokens it computes, and where the first of them lies among all tokens of the step."""

SAMPLE_INDEX = 0
SAMPLE_ROW = 1
SAMPLE_FIELDS = 2
"""A sample is two int32: where the token whose hidden state is scored lies among all tokens, and its sequence's row."""

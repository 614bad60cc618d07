"""`RaggedAttention` in compiled code, for the CPU: recorded as an instruction of a step's program.

Nothing is computed when `attend` is called; `engine.cpu.program` says what recording is.  Made by
`engine.runner.recorded_encoder`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.cpu.activations import float_row_bytes, splits_floats
from engine.cpu.catalogue import float_attention_kernel, split_attention_kernel
from engine.cpu.program import Recorder
from engine.cpu.ragged_shape import ragged_room
from engine.cpu.split_layout import PANEL_ROW_BYTES

_ZERO_BYTES = 128


class CompiledRaggedAttention:
    """Records on `recorder`; no text is longer than `longest` tokens."""

    def __init__(self, num_heads: int, head_dim: int, longest: int, recorder: Recorder) -> None:
        room = ragged_room(head_dim)
        self._num_heads = num_heads
        self._head_dim = head_dim
        self._recorder = recorder
        self._tokens = room.tokens(longest)
        self._scratch = recorder.workspace(recorder.team_size * (room.fixed_bytes + self._tokens * room.token_bytes))

    def begin_step(self, lengths: Sequence[int]) -> None:
        raise NotImplementedError("this attention is recorded; the program's own numbers describe a step")

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """Record attention to what `CompiledEncoderOps.linear` gives; its rows are packed for the next product."""
        recorder, width = self._recorder, self._num_heads * self._head_dim
        packed = recorder.scratch(float_row_bytes(width))
        if splits_floats():
            kernel, distance = split_attention_kernel, recorder.max_tokens * PANEL_ROW_BYTES
        else:
            kernel, distance = float_attention_kernel, recorder.stride(qkv)
        recorder.add(
            kernel(self._head_dim),
            recorder.address(qkv),
            distance,
            packed,
            recorder.sequences,
            self._num_heads,
            recorder.zeros(_ZERO_BYTES),
            self._scratch,
            self._tokens,
        )
        return recorder.packed_rows(width, packed)

"""Every step of an encoder on the CPU: one recorded program, run by a team of threads.

The counterpart of `engine.runner.recorded_steps` for texts that are computed whole: any number of them, of any
lengths, end to end, up to the sizes given.  A step ends with one pooled state per text; a classifier's head is left to
torch, for it has one row per text.  Implements `engine.runner.encoder_runner.EncoderSteps`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from engine.attention.compiled_ragged import CompiledRaggedAttention
from engine.cpu.catalogue import pool_kernel
from engine.cpu.encoder_ops import CompiledEncoderOps
from engine.cpu.program import Capacity, Recorder, Rows
from engine.cpu.ragged_shape import POOLING_MODES
from engine.cpu.step import NUM_SAMPLES, NUM_SEQUENCES, NUM_TOKENS, SEQUENCE_FIRST, SEQUENCE_TOKENS, STEP_SIZE
from engine.cpu.team import Team
from engine.models.encoder import EncoderModel
from engine.pooling.config import PoolingMode
from engine.runner.encoder_batch import EncoderBatch

_NO_ROWS = Rows(token_ids=0, token_id_stride=0, block_tables=0, block_table_stride=0)


class RecordedEncoderSteps:
    """The program of one model, whose weights must stay where they are.

    A step has at most `max_num_tokens` tokens in `max_num_texts` texts of up to `max_model_len` tokens.  `code_folder`
    keeps compiled kernels between starts.
    """

    def __init__(
        self,
        model: EncoderModel,
        ops: CompiledEncoderOps,
        mode: PoolingMode,
        team: Team,
        *,
        max_num_tokens: int,
        max_num_texts: int,
        max_model_len: int,
        code_folder: Path | None = None,
    ) -> None:
        capacity = Capacity(max_num_tokens, max_sequences=max_num_texts, max_samples=max_num_texts)
        recorder = Recorder(capacity, _NO_ROWS, team.size, code_folder)
        config = model.config
        self._head = model.head
        self._team = team
        self._step = np.zeros(STEP_SIZE, dtype=np.int64)
        self._sequences = recorder.sequence_records
        handles, self._inputs = zip(*(recorder.token_numbers() for _ in range(3)), strict=True)
        attention = CompiledRaggedAttention(config.num_heads, config.head_dim, max_model_len, recorder)
        with torch.inference_mode(), ops.recording(recorder):
            hidden = model(*handles, attention)
            pooled = _pool(recorder, hidden, mode)
        self.program = recorder.finish()
        self._pooled = recorder.view(pooled)

    @torch.inference_mode()
    def run(self, batch: EncoderBatch) -> torch.Tensor:
        """Pooled states [N, H], or a classifier's logits [N, 1]; valid until the next step."""
        num_texts = len(batch.lengths)
        for memory, numbers in zip(self._inputs, batch.inputs, strict=True):
            memory[: batch.num_tokens] = numbers
        self._sequences[:num_texts, SEQUENCE_TOKENS] = batch.lengths
        self._sequences[:num_texts, SEQUENCE_FIRST] = batch.starts[:-1]
        self._step[NUM_TOKENS] = batch.num_tokens
        self._step[NUM_SEQUENCES] = self._step[NUM_SAMPLES] = num_texts
        self.program.run(self._team, self._step)
        pooled = self._pooled[:num_texts]
        if self._head is None:
            return pooled
        logits: torch.Tensor = self._head(pooled)
        return logits


def _pool(recorder: Recorder, hidden: torch.Tensor, mode: PoolingMode) -> torch.Tensor:
    """One row per text."""
    pooled = recorder.buffer(hidden.shape[1], NUM_SAMPLES)
    source = recorder.address(hidden), recorder.stride(hidden)
    target = recorder.address(pooled), recorder.stride(pooled)
    recorder.add(pool_kernel(POOLING_MODES.index(mode)), recorder.sequences, *source, *target, hidden.shape[1])
    return pooled

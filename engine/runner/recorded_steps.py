"""Every step of a packed model on the CPU: one recorded program, run by a team of threads.

The counterpart of `engine.runner.captured_steps`, for steps of any kind: prompts and decodes mixed, up to the
sizes given.  A step ends with the likeliest token of every sequence that samples written to its row; a caller that
samples otherwise takes the logits and overwrites it, one that pools takes the hidden states.  Called by
`engine.runner.model_runner`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from engine.attention.compiled_paged import CompiledPagedAttention
from engine.core.batch import ScheduledBatch
from engine.cpu.catalogue import gather_kernel, likeliest_kernel, select_rows_kernel
from engine.cpu.ops import CompiledOps
from engine.cpu.program import Capacity, Recorder, Rows
from engine.cpu.step import NUM_DECODES, NUM_SAMPLES, STEP_SIZE
from engine.cpu.team import Team
from engine.models.decoder import DecoderModel
from engine.runner.model_runner import ReplayedStep
from engine.runner.rows import RowTable


class RecordedSteps:
    """The program of one model over one row table and one KV cache, which must stay where they are.

    Without `makes_logits` there are hidden states alone.  `code_folder` keeps compiled kernels between starts.
    """

    has_wanted = False

    def __init__(
        self,
        model: DecoderModel,
        ops: CompiledOps,
        attention: CompiledPagedAttention,
        rows: RowTable,
        team: Team,
        *,
        max_num_batched_tokens: int,
        makes_logits: bool = True,
        code_folder: Path | None = None,
    ) -> None:
        max_num_seqs, row_length = rows.token_ids.shape
        capacity = Capacity(max_num_batched_tokens, max_sequences=max_num_seqs, max_samples=max_num_seqs)
        recorder = Recorder(capacity, _rows(rows), team.size, code_folder)
        self._team = team
        self._step = np.zeros(STEP_SIZE, dtype=np.int64)
        self._sequences = recorder.sequence_records
        self._samples = recorder.sample_records
        self._likeliest = torch.zeros(recorder.max_samples, dtype=torch.int64)
        tables = recorder.block_tables, recorder.block_table_stride
        known = recorder.row_token_ids, recorder.row_token_id_stride
        outputs = recorder.token_ids, recorder.positions, recorder.slots
        recorder.add(gather_kernel(rows.block_size), recorder.sequences, *known, *tables, *outputs)
        with torch.inference_mode(), ops.recording(recorder):
            attention.record_on(recorder)
            hidden = model(recorder.token_id_handle, recorder.position_handle, attention)
            chosen = _select_samples(recorder, hidden)
            logits = model.logits(chosen) if makes_logits else None
        if logits is not None:
            scores = recorder.address(logits), recorder.stride(logits), logits.shape[1]
            results = recorder.address(self._likeliest), recorder.samples, recorder.positions
            recorder.add(likeliest_kernel(), *scores, *results, *known, row_length)
        self.program = recorder.finish()
        self._hidden = recorder.view(chosen)
        self._logits = torch.empty(recorder.max_samples, 0) if logits is None else recorder.view(logits)

    def capture_wanted(self) -> None:
        """Nothing is ever wanted: the one program serves every step."""

    def run(self, batch: ScheduledBatch) -> ReplayedStep:
        """Compute a step; likeliest ids are int64."""
        # Plain loops: after a step the caches hold weights, and every call into numpy costs ten microseconds.
        sequences, samples, num_tokens = [], [], 0
        for sequence in batch.sequences:
            sequences.append((sequence.row, sequence.start, sequence.num_tokens, num_tokens))
            num_tokens += sequence.num_tokens
            if sequence.samples or sequence.pools:
                samples.append((num_tokens - 1, sequence.row))
        num_samples = len(samples)
        self._sequences[: len(sequences)] = sequences
        self._samples[:num_samples] = samples if samples else 0
        self._step[: NUM_DECODES + 1] = num_tokens, num_samples, len(sequences), batch.num_decodes
        self.program.run(self._team, self._step)
        return ReplayedStep(self._logits[:num_samples], self._likeliest[:num_samples], self._hidden[:num_samples])


def _rows(rows: RowTable) -> Rows:
    ids, tables = rows.token_ids, rows.block_tables
    return Rows(
        token_ids=ids.data_ptr(),
        token_id_stride=ids.stride(0) * ids.element_size(),
        block_tables=tables.data_ptr(),
        block_table_stride=tables.stride(0) * tables.element_size(),
    )


def _select_samples(recorder: Recorder, hidden: torch.Tensor) -> torch.Tensor:
    """The rows of `hidden` whose tokens are scored or pooled."""
    chosen = recorder.buffer(hidden.shape[1], NUM_SAMPLES)
    source = recorder.address(hidden), recorder.stride(hidden)
    target = recorder.address(chosen), recorder.stride(chosen)
    recorder.add(select_rows_kernel(), recorder.samples, *source, *target, hidden.shape[1])
    return chosen

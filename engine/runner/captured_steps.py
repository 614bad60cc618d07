"""The two kinds of step that run as CUDA graphs: decodes alone, and one short prompt alone.

They are the ones whose kernels are too short to hide their launches, and the ones a single user
waits for.  Everything else runs kernel by kernel.  Both end with the likeliest token of every sequence
written to its row; a caller that samples otherwise takes the logits and overwrites it.  Called by
`engine.runner.model_runner`.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.backend import AttentionBackend, AttentionMetadata
from engine.core.batch import ScheduledBatch
from engine.core.step_sizes import PROMPT_SIZES, decode_sizes
from engine.kernels.greedy import greedy_append
from engine.runner.graph_ladder import GraphLadder, Outputs
from engine.runner.model_input import describe_sequences
from engine.runner.model_runner import ReplayedStep, RunnableModel
from engine.runner.rows import RowTable

DECODE_PATIENCE = 8
"""Steps of a size that are launched kernel by kernel: as much as a capture takes, and a passing size costs none."""

_PADDING = np.array([-1, 0, 1, 0], dtype=np.int32)[:, None]  # row, first position, number of tokens, flat index
_PROMPT_HEADER = 9  # two sequences, the prompt and its padding, and the index of the prompt's last token


class CapturedSteps:
    """Graphs of one model over one row table and one KV cache, which must stay where they are."""

    def __init__(
        self, model: RunnableModel, attention: AttentionBackend, rows: RowTable, *, max_num_batched_tokens: int
    ) -> None:
        self._model = model
        self._attention = attention
        self._rows = rows
        max_num_seqs, max_len = rows.token_ids.shape
        pool = torch.cuda.graph_pool_handle()
        sizes = decode_sizes(max_num_seqs)
        self.decodes = GraphLadder(
            "decodes", sizes, self._decode, _idle_decodes, rows.device, pool, patience=DECODE_PATIENCE
        )
        prompt_sizes = [size for size in PROMPT_SIZES if size <= min(max_len, max_num_batched_tokens)]
        self.prompts = GraphLadder(
            "a prompt", prompt_sizes, self._prompt, self._idle_prompt, rows.device, pool, patience=None
        )

    @property
    def ladders(self) -> tuple[GraphLadder, GraphLadder]:
        return (self.decodes, self.prompts)

    @property
    def has_wanted(self) -> bool:
        """Whether `capture_wanted` has anything left to do."""
        return any(ladder.has_wanted for ladder in self.ladders)

    @torch.inference_mode()
    def capture_wanted(self) -> None:
        """Capture one size that has come up without a graph; nothing must be in flight."""
        next(ladder for ladder in self.ladders if ladder.has_wanted).capture_wanted()

    def run(self, batch: ScheduledBatch) -> ReplayedStep | None:
        """Logits and likeliest ids, int32, of the batch's sequences; None when no graph serves it."""
        outputs = self._replay(batch)
        return None if outputs is None else ReplayedStep(*outputs)

    def _replay(self, batch: ScheduledBatch) -> Outputs | None:
        if batch.num_decodes == len(batch.sequences):
            return self._run_decodes(batch)
        if len(batch.sequences) == 1 and batch.sequences[0].samples:
            return self._run_prompt(batch)
        return None

    def _run_decodes(self, batch: ScheduledBatch) -> Outputs | None:
        count = len(batch.sequences)
        size = self.decodes.size_for(count)
        if size is None:
            return None

        def fill(inputs: np.ndarray) -> None:
            inputs[:] = _idle_decodes(size)
            inputs.reshape(4, size)[:, :count] = describe_sequences(batch)

        outputs = self.decodes.run(size, fill)
        return None if outputs is None else (outputs[0][:count], outputs[1][:count])

    def _run_prompt(self, batch: ScheduledBatch) -> Outputs | None:
        (prompt,) = batch.sequences
        size = self.prompts.size_for(prompt.num_tokens)
        if size is None:
            return None
        return self.prompts.run(
            size, lambda inputs: self._fill_prompt(inputs, size, prompt.row, prompt.start, prompt.num_tokens)
        )

    def _decode(self, inputs: torch.Tensor, size: int) -> Outputs:
        """One token of every sequence of `inputs` [4 x size], as `describe_sequences` lays them out."""
        sequences = inputs.view(4, size)
        step = self._rows.gather(sequences, size)
        self._attention.begin_step(
            AttentionMetadata(
                num_decodes=size,
                slot_mapping=step.slot_mapping,
                block_tables=self._rows.block_tables,
                rows=sequences[0],
                context_lens=step.context_lens,
                query_starts=tuple(range(size + 1)),
                host_context_lens=(),
            )
        )
        logits = self._model.logits(self._model(step.token_ids, step.positions, self._attention))
        return logits, self._append(logits, sequences[0], step.positions)

    def _prompt(self, inputs: torch.Tensor, size: int) -> Outputs:
        """One prompt padded to `size` tokens: header and tiles, as `_fill_prompt` lays them out."""
        sequences, last = inputs[:8].view(4, 2), inputs[8:_PROMPT_HEADER]
        step = self._rows.gather(sequences, size)
        self._attention.begin_step(
            AttentionMetadata(
                num_decodes=0,
                slot_mapping=step.slot_mapping,
                block_tables=self._rows.block_tables,
                rows=sequences[0],
                context_lens=step.context_lens,
                query_starts=(0, size),
                host_context_lens=(size,),
                prompt_tiles=inputs[_PROMPT_HEADER:].view(-1, 4),
            )
        )
        hidden = self._model(step.token_ids, step.positions, self._attention)
        logits = self._model.logits(hidden.index_select(0, last))
        return logits, self._append(logits, sequences[0, :1], step.positions.index_select(0, last))

    def _append(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        token_ids = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        greedy_append(logits, rows, positions, self._rows.token_ids, token_ids)
        return token_ids

    def _fill_prompt(self, inputs: np.ndarray, size: int, row: int, start: int, num_tokens: int) -> None:
        inputs[:8] = np.array([[row, -1], [start, 0], [num_tokens, size - num_tokens], [0, num_tokens]]).ravel()
        inputs[8] = num_tokens - 1
        inputs[_PROMPT_HEADER:] = self._attention.prompt_tiles(size, start, num_tokens).ravel()

    def _idle_prompt(self, size: int) -> np.ndarray:
        inputs = np.empty(_PROMPT_HEADER + self._attention.prompt_tiles(size, 0, size).size, dtype=np.int32)
        self._fill_prompt(inputs, size, row=-1, start=0, num_tokens=size)
        return inputs


def _idle_decodes(size: int) -> np.ndarray:
    table = np.repeat(_PADDING, size, axis=1)
    table[3] = np.arange(size)
    return table.ravel()

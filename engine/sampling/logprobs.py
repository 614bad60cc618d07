"""Logprobs of the rows that asked for them: computed on the device, turned into plain values on the host.

They are the model's own, before penalties, bias and temperature.  `engine.sampling.sampler` computes
them; the runner brings them to the host with the step's token ids and calls `HostLogprobs.by_row`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.api.output import TokenLogprobs
from engine.sampling.settings import SamplingRow, reporting_rows


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """n rows' logprobs in host memory, as `DeviceLogprobs` describes them."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    sampled: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def by_row(self, num_rows: int) -> tuple[TokenLogprobs | None, ...]:
        """One entry for each row of the step, None where the request did not ask."""
        reports: list[TokenLogprobs | None] = [None] * num_rows
        columns = (self.sampled.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist())
        for row, count, logprob, ids, logprobs in zip(self.rows, self.counts, *columns, strict=True):
            reports[row] = TokenLogprobs(logprob, tuple(ids[:count]), tuple(logprobs[:count]))
        return tuple(reports)


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Logprobs of the n rows of a step that asked, still on the device.

    rows           positions in the step
    counts         alternatives each of them asked for
    sampled        float32 [n], of the token that was sampled
    top_ids        int64 [n, k], by falling probability; k is the largest of `counts`
    top_logprobs   float32 [n, k]
    """

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    sampled: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def to_host(self, *, non_blocking: bool = False) -> HostLogprobs:
        """Copy to the host; non-blocking copies go to pinned memory and may be read after an event recorded later."""
        tensors = (self.sampled, self.top_ids, self.top_logprobs)
        on_host = (tensor.to("cpu", non_blocking=non_blocking) for tensor in tensors)
        return HostLogprobs(self.rows, self.counts, *on_host)


class ModelLogprobs:
    """Log-probabilities of the reporting rows, taken before their logits are adjusted."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[SamplingRow], reporting: torch.Tensor) -> None:
        """logits [N, V]; `reporting` [n], any dtype: the rows to report, on the logits' device."""
        self._positions = reporting_rows(rows)
        self._index = reporting.long()
        self._logprobs = logits.index_select(0, self._index).log_softmax(-1, dtype=torch.float32)
        self._counts = tuple(rows[position].start.sampling.logprobs or 0 for position in self._positions)

    def of(self, token_ids: torch.Tensor) -> DeviceLogprobs:
        """The report on the sampled `token_ids` int64 [N]."""
        sampled = token_ids.index_select(0, self._index)
        top_logprobs, top_ids = self._logprobs.topk(max(self._counts), dim=-1)
        return DeviceLogprobs(
            self._positions,
            self._counts,
            self._logprobs.gather(1, sampled[:, None])[:, 0],
            top_ids,
            top_logprobs,
        )

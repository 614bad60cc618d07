"""`CompiledOps`: the `Ops` of the compiled CPU path, which record instructions and compute nothing.

A model built with these runs only while `recording`; what it records is then run step by step
(`engine.runner.recorded_steps`).  Weights are packed matrices; all other tensors are float32.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.cpu.matrix_kernels import matrix_kernel
from engine.cpu.matrix_tile import GROUP
from engine.cpu.pack_kernels import gate_pack_kernel, norm_pack_kernel, pack_kernel
from engine.cpu.program import Recorder, Scratch
from engine.cpu.row_blocks import packed_row_bytes
from engine.cpu.row_kernels import add_kernel, embed_packed_kernel, rotation_kernel
from engine.layers.packed_weight import PackedWeight


class CompiledOps:
    """See `engine.kernels.ops.Ops`; tensors are handles of the recorder."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Record on `recorder` within the context."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    def embed(self, token_ids: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        recorder = self._recording
        (matrix,) = weight.segments
        output = recorder.buffer(weight.in_features)
        recorder.add(
            embed_packed_kernel(matrix.bits),
            recorder.address(token_ids),
            recorder.address(matrix.data),
            _num_groups(weight.in_features),
            recorder.address(output),
            recorder.stride(output),
        )
        return output

    def norm_linear(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weight: PackedWeight,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        recorder = self._recording
        rows, columns = recorder.rows(hidden), weight.in_features
        packed = recorder.scratch(packed_row_bytes(columns), rows)
        # Without a residual the sum is a copy of `hidden`: zero columns more to read, and one kernel less.
        nothing = recorder.zeros(4 * columns + 4 * GROUP)
        total = recorder.buffer(columns, rows)
        recorder.add(
            norm_pack_kernel(),
            recorder.address(hidden),
            recorder.stride(hidden),
            nothing if residual is None else recorder.address(residual),
            0 if residual is None else recorder.stride(residual),
            recorder.address(total),
            recorder.stride(total),
            recorder.address(norm_weight),
            _float_bits(eps),
            columns,
            packed.address,
            rows,
        )
        return self._multiply(packed, rows, weight, bias), total

    def linear(self, hidden: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        recorder = self._recording
        rows = recorder.rows(hidden)
        packed = recorder.scratch(packed_row_bytes(weight.in_features), rows)
        source = recorder.address(hidden), recorder.stride(hidden)
        recorder.add(pack_kernel(), *source, weight.in_features, packed.address, rows)
        return self._multiply(packed, rows, weight, bias)

    def gated_linear(self, gate_up: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        recorder = self._recording
        rows = recorder.rows(gate_up)
        packed = recorder.scratch(packed_row_bytes(weight.in_features), rows)
        source = recorder.address(gate_up), recorder.stride(gate_up)
        recorder.add(gate_pack_kernel(), *source, weight.in_features, packed.address, rows)
        return self._multiply(packed, rows, weight, bias)

    def add(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        recorder = self._recording
        rows, columns = recorder.rows(hidden), hidden.shape[1]
        total = recorder.buffer(columns, rows)
        places = ((recorder.address(handle), recorder.stride(handle)) for handle in (hidden, residual, total))
        recorder.add(add_kernel(), *itertools.chain(*places), columns, rows)
        return total

    def rotation_tables(
        self, positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        recorder = self._recording
        num_pairs = len(inverse_frequencies)
        cos, sin = recorder.buffer(num_pairs), recorder.buffer(num_pairs)
        recorder.add(
            rotation_kernel(),
            recorder.address(positions),
            recorder.address(inverse_frequencies),
            _float_bits(scale),
            num_pairs,
            recorder.address(cos),
            recorder.address(sin),
            recorder.stride(cos),
        )
        return cos, sin

    def _multiply(self, packed: Scratch, rows: int, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        recorder = self._recording
        output = recorder.buffer(weight.out_features, rows)
        stride = recorder.stride(output)
        bias_address = recorder.zeros(stride) if bias is None else recorder.padded(bias)
        offset = 0
        for matrix in weight.segments:
            num_tiles, num_groups = matrix.data.shape[:2]
            recorder.add(
                matrix_kernel(matrix.bits),
                packed.address,
                recorder.address(matrix.data),
                bias_address + offset,
                recorder.address(output) + offset,
                stride,
                num_groups,
                num_tiles,
                rows,
            )
            offset += 4 * matrix.out_features
        return output

    @property
    def _recording(self) -> Recorder:
        assert self._recorder is not None, "a compiled model runs only while it is recorded"
        return self._recorder


def _num_groups(columns: int) -> int:
    return -(-columns // GROUP)


def _float_bits(number: float) -> int:
    """The bits of a float32, as kernels read it from their arguments."""
    return int.from_bytes(struct.pack("<f", number), "little")

"""`CompiledOps`: the `Ops` of the compiled CPU path, which record instructions and compute nothing.

A model built with these runs only while `recording`; what it records is then run step by step
(`engine.runner.recorded_steps`).  Weights are packed matrices, quantised or floats; all other tensors are float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.cpu import catalogue
from engine.cpu.activations import FLOAT_GROUP, GROUP, float_row_bytes, packed_row_bytes
from engine.cpu.program import Recorder, float_bits
from engine.layers.packed_floats import FLOAT_DTYPES, FloatMatrix
from engine.layers.packed_splits import SplitMatrix
from engine.layers.packed_weight import PackedMatrix, PackedWeight


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
        if isinstance(matrix, PackedMatrix):
            kernel = catalogue.embed_packed_kernel(matrix.coding.bits, matrix.coding.is_symmetric)
        else:
            kernel = catalogue.embed_floats_kernel(_format(matrix))
        recorder.add(
            kernel,
            recorder.address(token_ids),
            recorder.address(matrix.data),
            _num_groups(matrix),
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
        packed = recorder.scratch(_activation_bytes(weight), rows)
        # Without a residual the sum is a copy of `hidden`: zero columns more to read, and one kernel less.
        nothing = recorder.zeros(4 * columns + 4 * GROUP)
        total = recorder.buffer(columns, rows)
        recorder.add(
            catalogue.norm_pack_kernel() if weight.is_quantized else catalogue.norm_floats_kernel(),
            recorder.address(hidden),
            recorder.stride(hidden),
            nothing if residual is None else recorder.address(residual),
            0 if residual is None else recorder.stride(residual),
            recorder.address(total),
            recorder.stride(total),
            recorder.address(norm_weight),
            float_bits(eps),
            columns,
            packed,
            rows,
        )
        return self._multiply(packed, rows, weight, bias), total

    def linear(self, hidden: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        recorder = self._recording
        rows = recorder.rows(hidden)
        packed = recorder.scratch(_activation_bytes(weight), rows)
        source = recorder.address(hidden), recorder.stride(hidden)
        kernel = catalogue.pack_kernel() if weight.is_quantized else catalogue.plain_floats_kernel()
        recorder.add(kernel, *source, weight.in_features, packed, rows)
        return self._multiply(packed, rows, weight, bias)

    def gated_linear(self, gate_up: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        recorder = self._recording
        rows = recorder.rows(gate_up)
        packed = recorder.scratch(_activation_bytes(weight), rows)
        source = recorder.address(gate_up), recorder.stride(gate_up)
        kernel = catalogue.gate_pack_kernel() if weight.is_quantized else catalogue.gate_floats_kernel()
        recorder.add(kernel, *source, weight.in_features, packed, rows)
        return self._multiply(packed, rows, weight, bias)

    def add(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        recorder = self._recording
        rows, columns = recorder.rows(hidden), hidden.shape[1]
        total = recorder.buffer(columns, rows)
        places = ((recorder.address(handle), recorder.stride(handle)) for handle in (hidden, residual, total))
        recorder.add(catalogue.add_kernel(), *itertools.chain(*places), columns, rows)
        return total

    def rotation_tables(
        self, positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        recorder = self._recording
        num_pairs = len(inverse_frequencies)
        cos, sin = recorder.buffer(num_pairs), recorder.buffer(num_pairs)
        recorder.add(
            catalogue.rotation_kernel(),
            recorder.address(positions),
            recorder.address(inverse_frequencies),
            float_bits(scale),
            num_pairs,
            recorder.address(cos),
            recorder.address(sin),
            recorder.stride(cos),
        )
        return cos, sin

    def _multiply(self, packed: int, rows: int, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        recorder = self._recording
        output = recorder.buffer(weight.out_features, rows)
        stride = recorder.stride(output)
        bias_address = recorder.zeros(stride) if bias is None else recorder.padded(bias)
        offset = 0
        for matrix in weight.segments:
            if isinstance(matrix, PackedMatrix):
                kernel = catalogue.matrix_kernel(matrix.coding.bits, matrix.coding.is_symmetric)
            else:
                kernel = catalogue.float_matrix_kernel(_format(matrix))
            recorder.add(
                kernel,
                packed,
                recorder.address(matrix.data),
                bias_address + offset,
                recorder.address(output) + offset,
                stride,
                _num_groups(matrix),
                len(matrix.data),
                rows,
            )
            offset += 4 * matrix.out_features
        return output

    @property
    def _recording(self) -> Recorder:
        assert self._recorder is not None, "a compiled model runs only while it is recorded"
        return self._recorder


def _num_groups(matrix: PackedMatrix | FloatMatrix | SplitMatrix) -> int:
    """Groups of inputs as the matrix's kernels count them."""
    group = GROUP if isinstance(matrix, PackedMatrix) else FLOAT_GROUP
    return -(-matrix.in_features // group)


def _activation_bytes(weight: PackedWeight) -> int:
    """What one row of activations takes, packed as the weight's kernels read them."""
    if weight.is_quantized:
        return packed_row_bytes(weight.in_features)
    assert weight.in_features % FLOAT_GROUP == 0, "the kernels read whole groups"
    return float_row_bytes(weight.in_features)


def _format(matrix: FloatMatrix | SplitMatrix) -> int:
    """The number by which kernels know the matrix's dtype."""
    assert isinstance(matrix, FloatMatrix), "split matrices are for `engine.cpu.encoder_ops`"
    return FLOAT_DTYPES.index(matrix.data.dtype)

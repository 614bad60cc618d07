"""`CompiledEncoderOps`: the `EncoderOps` of the compiled CPU path, which record instructions and compute nothing.

A norm, a GELU and attention leave their rows packed for the product that follows, so nothing packs them again.
Products are of split numbers where the processor has a unit for them (`engine.cpu.split_emit`), else of float32.
Sizes are multiples of 32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.cpu import catalogue
from engine.cpu.activations import float_row_bytes, splits_floats
from engine.cpu.ops import CompiledOps
from engine.cpu.program import float_bits
from engine.cpu.split_layout import GROUP_BYTES, GROUP_INPUTS, PANEL_ROW_BYTES, TILE_OUTPUTS
from engine.kernels.encoder_ops import EmbeddingTables, NormWeights
from engine.layers.packed_splits import SplitMatrix, split
from engine.layers.packed_weight import CodedRows, PackedWeight, pack


class CompiledEncoderOps(CompiledOps):
    """See `engine.kernels.encoder_ops.EncoderOps`; tensors are handles of the recorder."""

    def pack(self, parts: Sequence[CodedRows | torch.Tensor]) -> PackedWeight:
        floats = [part for part in parts if isinstance(part, torch.Tensor)]
        if not splits_floats():
            return pack(floats)
        return PackedWeight((split(floats),))

    def embed_norm(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        type_ids: torch.Tensor,
        tables: EmbeddingTables,
        norm: NormWeights,
    ) -> torch.Tensor:
        recorder = self._recording
        columns = len(norm.weight)
        output = recorder.buffer(columns)
        packed = recorder.scratch(float_row_bytes(columns))
        recorder.add(
            catalogue.embed_norm_kernel(),
            *(recorder.address(numbers) for numbers in (token_ids, positions, type_ids)),
            *(recorder.address(table) for table in (tables.words, tables.positions, tables.types)),
            recorder.address(output),
            recorder.stride(output),
            packed,
            recorder.address(norm.weight),
            recorder.address(norm.bias),
            float_bits(norm.eps),
            columns,
        )
        recorder.note_packed(output, packed)
        return output

    def linear(self, hidden: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """For attention (`engine.attention.compiled_ragged`), which reads split products in panels."""
        (matrix, *_) = weight.segments
        if not isinstance(matrix, SplitMatrix):
            return self.linear_rows(hidden, weight, bias)
        recorder = self._recording
        panels = recorder.scratch(4 * matrix.out_features)
        distance = recorder.max_tokens * PANEL_ROW_BYTES
        self._multiply_split(hidden, matrix, bias, (panels, PANEL_ROW_BYTES, distance))
        return recorder.panels(matrix.out_features, panels)

    def linear_gelu(self, hidden: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        recorder = self._recording
        rows, columns = recorder.rows(hidden), weight.out_features
        (matrix, *_) = weight.segments
        if isinstance(matrix, SplitMatrix):
            target = recorder.scratch(float_row_bytes(columns), rows)
            block_bytes = columns // GROUP_INPUTS * GROUP_BYTES
            self._multiply_split(hidden, matrix, bias, (target, block_bytes, GROUP_BYTES), has_gelu=True)
        else:
            product = self.linear_rows(hidden, weight, bias)
            source = recorder.address(product), recorder.stride(product)
            target = recorder.scratch(float_row_bytes(columns), rows)
            recorder.add(catalogue.gelu_floats_kernel(), *source, columns, target, rows)
        return recorder.packed_rows(columns, target)

    def linear_add_norm(
        self,
        hidden: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: NormWeights,
    ) -> torch.Tensor:
        recorder = self._recording
        product = self.linear_rows(hidden, weight, bias)
        rows, columns = recorder.rows(residual), weight.out_features
        output = recorder.buffer(columns, rows)
        packed = recorder.scratch(float_row_bytes(columns), rows)
        recorder.add(
            catalogue.layer_norm_kernel(),
            recorder.address(product),
            recorder.stride(product),
            recorder.address(residual),
            recorder.stride(residual),
            recorder.address(output),
            recorder.stride(output),
            packed,
            recorder.address(norm.weight),
            recorder.address(norm.bias),
            float_bits(norm.eps),
            columns,
            rows,
        )
        recorder.note_packed(output, packed)
        return output

    def linear_rows(self, hidden: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """hidden · weightᵀ + bias, row by row."""
        recorder = self._recording
        rows = recorder.rows(hidden)
        (matrix, *_) = weight.segments
        if not isinstance(matrix, SplitMatrix):
            return self._multiply(self._packed(hidden), rows, weight, bias)
        output = recorder.buffer(weight.out_features, rows)
        place = recorder.address(output), recorder.stride(output), 4 * TILE_OUTPUTS
        self._multiply_split(hidden, matrix, bias, place)
        return output

    def _multiply_split(
        self,
        hidden: torch.Tensor,
        matrix: SplitMatrix,
        bias: torch.Tensor | None,
        place: tuple[int, int, int],
        *,
        has_gelu: bool = False,
    ) -> None:
        """`place` is where the first output goes, and how far rows and tiles of outputs are apart, in bytes."""
        recorder = self._recording
        recorder.add(
            catalogue.split_matrix_kernel(has_gelu),
            self._packed(hidden),
            recorder.address(matrix.data),
            recorder.zeros(4 * matrix.out_features) if bias is None else recorder.address(bias),
            *place,
            matrix.in_features // GROUP_INPUTS,
            matrix.out_features // TILE_OUTPUTS,
            recorder.rows(hidden),
        )

    def _packed(self, hidden: torch.Tensor) -> int:
        packed = self._recording.packed(hidden)
        assert packed is not None, "an encoder's products follow a norm, a GELU or attention"
        return packed

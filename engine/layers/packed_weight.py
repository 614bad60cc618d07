"""`PackedWeight`: matrices in the order in which a compiled product reads them, quantised or plain floats.

Floats are `engine.layers.packed_floats.FloatMatrix`, or `engine.layers.packed_splits.SplitMatrix`.

A quantised weight [N, K] is cut into tiles of 16 outputs and groups of 32 inputs, with unsigned codes of 4 or 8
bits, and a float16 scale for each output and group.  A weight is scale · code + minimum, with a float16 minimum too,
or, where the matrix is symmetric, scale · (code - zero) with the middle code as zero.  Each tile and group is one
record: the codes, 16 scales, and 16 minimums if there are any.  Input 4 j + i of a group and output lane o lie

- with 8 bits at byte 64 j + 4 o + i (a record has 576 bytes, or 544 without minimums);
- with 4 bits at byte 64 (j mod 4) + 4 o + i, in the low half if j < 4, else in the high one (320, or 288).

So four inputs of sixteen outputs are one 64-byte vector, as dot product instructions take it.  Outputs and
inputs are padded with zeros: their scales are.  `CodedRows` is what `pack` makes quantised matrices of.  Knows no
file format and no way to quantise; used by `engine.layers.packed_linear`, `engine.cpu`, and
`engine.kernels.torch_ops`, the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, get_args

import torch

from engine.layers.packed_floats import TILE_OUTPUTS, FloatMatrix, pack_floats
from engine.layers.packed_splits import SplitMatrix

Bits = Literal[4, 8]

GROUP_INPUTS = 32
_QUAD_INPUTS = 4


@dataclass(frozen=True, slots=True)
class Coding:
    """What the codes of a matrix are, and so what its records hold."""

    bits: Bits
    is_symmetric: bool

    @property
    def zero(self) -> int:
        """The code that stands for 0 where there are no minimums."""
        return 1 << (self.bits - 1)

    @property
    def code_bytes(self) -> int:
        """What the codes of a record take."""
        return TILE_OUTPUTS * GROUP_INPUTS * self.bits // 8

    @property
    def record_bytes(self) -> int:
        return self.code_bytes + 2 * TILE_OUTPUTS * (1 if self.is_symmetric else 2)


CODINGS = tuple(Coding(bits, is_symmetric) for bits in get_args(Bits) for is_symmetric in (False, True))
"""All there are; each has records of another size."""


@dataclass(frozen=True, slots=True)
class CodedRows:
    """A quantised matrix [N, in_features] row by row, as checkpoints have it.

    `codes` is uint8 [N, groups, 4 bits]: a byte per code, or, with 4 bits, input b of a group in the low half of
    byte b and input b + 16 in the high half.  `scales` and `minimums` are float16 [N, groups]; without minimums the
    matrix is symmetric.  Inputs are padded with zeros to whole groups.
    """

    bits: Bits
    in_features: int
    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None

    def __post_init__(self) -> None:
        groups = -(-self.in_features // GROUP_INPUTS)
        assert self.codes.shape[1:] == (groups, GROUP_INPUTS * self.bits // 8), tuple(self.codes.shape)
        for numbers in (self.scales,) if self.minimums is None else (self.scales, self.minimums):
            assert numbers.shape == self.codes.shape[:2] and numbers.dtype == torch.float16

    @property
    def coding(self) -> Coding:
        return Coding(self.bits, self.minimums is None)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.in_features

    def with_rows(self, rearrange: Callable[[torch.Tensor], torch.Tensor]) -> CodedRows:
        """The matrix with its rows rearranged by a function that moves entries of the first dimension only."""
        minimums = None if self.minimums is None else rearrange(self.minimums)
        return CodedRows(self.bits, self.in_features, rearrange(self.codes), rearrange(self.scales), minimums)

    def with_minimums(self) -> CodedRows:
        """The same weights as a matrix that is not symmetric."""
        minimums = self.scales * -self.coding.zero if self.minimums is None else self.minimums
        return CodedRows(self.bits, self.in_features, self.codes, self.scales, minimums)

    def widened(self) -> CodedRows:
        """The same weights with a byte per code."""
        if self.bits == 8:
            return self
        codes = torch.cat((self.codes & 15, self.codes >> 4), dim=2)
        if self.minimums is None:
            codes += Coding(8, True).zero - self.coding.zero
        return CodedRows(8, self.in_features, codes, self.scales, self.minimums)

    def dequantize(self) -> torch.Tensor:
        """The weights, float32 [N, in_features]."""
        wide = self.widened()
        scales = wide.scales.float().unsqueeze(2)
        if wide.minimums is None:
            values = (wide.codes.float() - wide.coding.zero) * scales
        else:
            values = wide.codes.float() * scales + wide.minimums.float().unsqueeze(2)
        return values.flatten(1)[:, : self.in_features]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One quantised matrix [out_features, in_features]; `data` is uint8 [tiles, groups, record bytes], contiguous.

    `data` may be a read-only memory map: it is never written to.
    """

    coding: Coding
    out_features: int
    in_features: int
    data: torch.Tensor

    def __post_init__(self) -> None:
        expected = packed_shape(self.coding, self.out_features, self.in_features)
        assert self.data.dtype == torch.uint8 and self.data.is_contiguous()
        assert tuple(self.data.shape) == expected, f"{tuple(self.data.shape)} is not {expected}"

    def dequantize(self) -> torch.Tensor:
        """The weights, float32 [out_features, in_features]."""
        return _decode(self.data, self.coding)[: self.out_features, : self.in_features]

    def dequantize_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The weights of some outputs, integers [R]: float32 [R, in_features]."""
        tiles, lanes = rows // TILE_OUTPUTS, rows % TILE_OUTPUTS
        wanted = _decode(self.data[tiles], self.coding).view(rows.numel(), TILE_OUTPUTS, -1)
        return wanted[torch.arange(rows.numel(), device=rows.device), lanes, : self.in_features]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Several matrices of one input whose outputs lie side by side: all quantised, all floats, or all split.

    All segments but the last have a multiple of 16 outputs.
    """

    segments: tuple[PackedMatrix | FloatMatrix | SplitMatrix, ...]

    def __post_init__(self) -> None:
        assert len({(type(segment), segment.in_features) for segment in self.segments}) == 1
        assert all(segment.out_features % TILE_OUTPUTS == 0 for segment in self.segments[:-1])

    @property
    def out_features(self) -> int:
        return sum(segment.out_features for segment in self.segments)

    @property
    def in_features(self) -> int:
        return self.segments[0].in_features

    @property
    def is_quantized(self) -> bool:
        """Whether its segments are codes, which need quantised activations."""
        return isinstance(self.segments[0], PackedMatrix)

    @property
    def nbytes(self) -> int:
        """What the data of all segments takes."""
        return sum(segment.data.nbytes for segment in self.segments)

    def dequantize(self) -> torch.Tensor:
        """The weights, float32 [out_features, in_features]."""
        return torch.cat([segment.dequantize() for segment in self.segments])


def packed_shape(coding: Coding, out_features: int, in_features: int) -> tuple[int, int, int]:
    """The shape of a matrix's `data`: tiles, groups, and bytes per record."""
    return -(-out_features // TILE_OUTPUTS), -(-in_features // GROUP_INPUTS), coding.record_bytes


def empty_rows(coding: Coding, out_features: int, in_features: int, *, device: torch.device) -> CodedRows:
    """Uninitialised rows, to be written to."""
    groups = -(-in_features // GROUP_INPUTS)
    codes = torch.empty((out_features, groups, GROUP_INPUTS * coding.bits // 8), dtype=torch.uint8, device=device)
    scales, minimums = torch.empty((2, out_features, groups), dtype=torch.float16, device=device)
    return CodedRows(coding.bits, in_features, codes, scales, None if coding.is_symmetric else minimums)


def pack(parts: Sequence[CodedRows | torch.Tensor]) -> PackedWeight:
    """The weight whose outputs are those of `parts`, all of one input width, one after the other.

    Parts are all coded, or all floats, for which see `pack_floats`.  Neighbours of one coding become one segment.
    Where a part other than the last does not end with a tile, everything becomes one segment of 8 bits.
    """
    coded = [part for part in parts if isinstance(part, CodedRows)]
    if not coded:
        return PackedWeight(pack_floats([part for part in parts if isinstance(part, torch.Tensor)]))
    assert len(coded) == len(parts), "quantised matrices and floats need different activations"
    if any(part.shape[0] % TILE_OUTPUTS for part in coded[:-1]):
        coded = [_concatenate(coded)]
    return PackedWeight(tuple(_pack_segment(list(run)) for _, run in groupby(coded, key=lambda part: part.coding)))


def _concatenate(parts: Sequence[CodedRows]) -> CodedRows:
    """The parts as one matrix of 8 bits, symmetric if all of them are."""
    if not all(part.coding.is_symmetric for part in parts):
        parts = [part.with_minimums() for part in parts]
    parts = [part.widened() for part in parts]
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return CodedRows(
        8,
        parts[0].in_features,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minimums) if minimums else None,
    )


def _pack_segment(parts: Sequence[CodedRows]) -> PackedMatrix:
    """Parts of one coding, which all but the last end with a tile."""
    coding, in_features = parts[0].coding, parts[0].in_features
    out_features = sum(part.shape[0] for part in parts)
    shape = packed_shape(coding, out_features, in_features)
    data = torch.empty(shape, dtype=torch.uint8, device=parts[0].codes.device)
    tile = 0
    for part in parts:
        whole, rest = divmod(part.shape[0], TILE_OUTPUTS)
        if whole:
            _write_tiles(part, slice(0, whole * TILE_OUTPUTS), data[tile : tile + whole])
            tile += whole
        if rest:
            _write_tiles(part, slice(whole * TILE_OUTPUTS, None), data[tile:])
    return PackedMatrix(coding, out_features, in_features, data)


def _write_tiles(part: CodedRows, rows: slice, records: torch.Tensor) -> None:
    """Some rows of `part` to records [tiles, groups, bytes]; the last tile may lack rows."""
    code_bytes = part.coding.code_bytes
    # Quads are moved as whole 32-bit numbers.
    quads = _padded(part.codes[rows]).view(torch.int32).unflatten(0, (-1, TILE_OUTPUTS))
    vectors = records[..., :code_bytes].view(torch.int32).unflatten(2, (-1, TILE_OUTPUTS))
    vectors.copy_(quads.permute(0, 2, 3, 1))
    numbers = records[..., code_bytes:].view(torch.float16).unflatten(2, (-1, TILE_OUTPUTS))
    for place, values in enumerate((part.scales,) if part.minimums is None else (part.scales, part.minimums)):
        numbers[:, :, place].copy_(_padded(values[rows]).unflatten(0, (-1, TILE_OUTPUTS)).transpose(1, 2))


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous, with zeros for the rows that the last tile lacks."""
    missing = -rows.shape[0] % TILE_OUTPUTS
    return torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:])))) if missing else rows.contiguous()


def _decode(records: torch.Tensor, coding: Coding) -> torch.Tensor:
    """Records uint8 [tiles, groups, bytes] -> float32 [16 tiles, 32 groups]."""
    tiles, groups, _ = records.shape
    stored = records[..., : coding.code_bytes].unflatten(2, (-1, TILE_OUTPUTS, _QUAD_INPUTS))
    codes = torch.cat((stored & 15, stored >> 4), dim=2) if coding.bits == 4 else stored
    numbers = records[..., coding.code_bytes :].contiguous().view(torch.float16).float()
    scales, *minimums = numbers.view(tiles, groups, -1, 1, TILE_OUTPUTS, 1).unbind(2)
    # [tiles, groups, quads, outputs, inputs of a quad]
    values = codes.float() * scales + minimums[0] if minimums else (codes.float() - coding.zero) * scales
    return values.permute(0, 3, 1, 2, 4).reshape(tiles * TILE_OUTPUTS, groups * GROUP_INPUTS)

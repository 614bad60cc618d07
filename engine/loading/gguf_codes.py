"""GGUF blocks -> codes, scales and minimums, without a detour over floats where groups are of 32 inputs.

Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 keep their weights to the last bit; Q4_K and Q5_K keep their codes, and their
scales and minimums are rounded to float16.  Q6_K has groups of 16 and is quantised anew, to 8 bits.  Block
layouts: see `engine.loading.gguf_dequantize`, the reference.  Used by `GgufCheckpoint`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.api.errors import BrokenCheckpoint
from engine.layers.packed_weight import GROUP_INPUTS, CodedRows, Coding, empty_rows
from engine.loading.gguf_dequantize import dequantize, k_scales
from engine.loading.quantize import INT8, quantize_into, row_chunks
from store.formats.gguf_types import GGUF_BLOCK_SIZES

Coded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes [groups, 4 bits], scales and minimums [groups], as in `CodedRows`."""


def coding_of(type_name: str) -> Coding | None:
    """What the codes of a type become; None for types of plain numbers."""
    if type_name in _CODERS:
        return _CODERS[type_name][0]
    return INT8 if type_name in _REQUANTIZED else None


def code_rows(name: str, raw: torch.Tensor, type_name: str, shape: tuple[int, int]) -> CodedRows:
    """Flat uint8 `raw` of the matrix `name`, of a type that `coding_of` knows; the codes may share its memory.

    Raises `BrokenCheckpoint` for rows that are no whole number of blocks, and for scales that are not finite.
    """
    block_elements, block_bytes = GGUF_BLOCK_SIZES[type_name]
    if shape[1] % block_elements:
        raise BrokenCheckpoint(
            f"The rows of the tensor {name!r} are no whole number of {type_name} blocks; pull the model again."
        )
    if type_name in _REQUANTIZED:
        return _requantize(name, raw.view(shape[0], -1), type_name, shape)
    coding, read_blocks = _CODERS[type_name]
    groups = shape[1] // GROUP_INPUTS
    codes, scales, minimums = read_blocks(raw.view(-1, block_bytes))
    if not (scales.isfinite().all() and (minimums is None or minimums.isfinite().all())):
        raise BrokenCheckpoint(f"The tensor {name!r} has scales that are not finite; pull the model again.")
    return CodedRows(
        coding.bits,
        shape[1],
        codes.reshape(shape[0], groups, -1),
        scales.reshape(shape[0], groups),
        None if minimums is None else minimums.reshape(shape[0], groups),
    )


def _requantize(name: str, raw_rows: torch.Tensor, type_name: str, shape: tuple[int, int]) -> CodedRows:
    coded = empty_rows(INT8, *shape, device=torch.device("cpu"))
    for rows in row_chunks(*shape):
        part = raw_rows[rows]
        values = dequantize(part.reshape(-1), type_name, (part.shape[0], shape[1]))
        quantize_into(name, values, coded, rows)
    return coded


def _halves(blocks: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """`count` float16 numbers from byte `start` of each block: [blocks, count]."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16)


def _with_fifth_bits(nibbles: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Nibbles [blocks, 16], input b low and b + 16 high, and bits [blocks, 4], bit j of input j: codes [blocks, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device="cpu")
    high = ((bits.unsqueeze(2) >> shifts) & 1).flatten(1)
    return torch.cat((nibbles & 15, nibbles >> 4), dim=1).add_(high, alpha=16)


def _code_q4_0(blocks: torch.Tensor) -> Coded:
    return blocks[:, 2:], _halves(blocks, 0, 1), None


def _code_q4_1(blocks: torch.Tensor) -> Coded:
    scales, minimums = _halves(blocks, 0, 2).split(1, dim=1)
    return blocks[:, 4:], scales, minimums


def _code_q5_0(blocks: torch.Tensor) -> Coded:
    return _with_fifth_bits(blocks[:, 6:], blocks[:, 2:6]).add_(INT8.zero - 16), _halves(blocks, 0, 1), None


def _code_q5_1(blocks: torch.Tensor) -> Coded:
    scales, minimums = _halves(blocks, 0, 2).split(1, dim=1)
    return _with_fifth_bits(blocks[:, 8:], blocks[:, 4:8]), scales, minimums


def _code_q8_0(blocks: torch.Tensor) -> Coded:
    # The sign bit flipped is 128 added.
    return blocks[:, 2:] ^ 128, _halves(blocks, 0, 1), None


def _code_q4_k(blocks: torch.Tensor) -> Coded:
    """Each 32 bytes hold two groups, one in the low halves and one in the high ones."""
    scales, minimums = k_scales(blocks)
    first, second = blocks[:, 16:].unflatten(1, (4, 2, 16)).unbind(2)
    codes = torch.stack(((first & 15) | (second << 4), (first >> 4) | (second & 240)), dim=2)
    return codes.view(-1, 16), scales.half(), -minimums.half()


def _code_q5_k(blocks: torch.Tensor) -> Coded:
    scales, minimums = k_scales(blocks)
    nibbles = blocks[:, 48:].unflatten(1, (4, 1, 32))
    shifts = torch.arange(8, dtype=torch.uint8, device="cpu").view(8, 1)
    high = (blocks[:, None, 16:48] >> shifts) & 1
    codes = torch.cat((nibbles & 15, nibbles >> 4), dim=2).view(-1, 8, 32).add_(high, alpha=16)
    return codes, scales.half(), -minimums.half()


_CODERS: dict[str, tuple[Coding, Callable[[torch.Tensor], Coded]]] = {
    "Q4_0": (Coding(4, is_symmetric=True), _code_q4_0),
    "Q4_1": (Coding(4, is_symmetric=False), _code_q4_1),
    "Q5_0": (INT8, _code_q5_0),
    "Q5_1": (Coding(8, is_symmetric=False), _code_q5_1),
    "Q8_0": (INT8, _code_q8_0),
    "Q4_K": (Coding(4, is_symmetric=False), _code_q4_k),
    "Q5_K": (Coding(8, is_symmetric=False), _code_q5_k),
}
_REQUANTIZED = frozenset({"Q6_K"})

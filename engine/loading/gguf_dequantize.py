"""GGUF tensor data -> float tensors.

Block layouts are those of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h);
results equal the `gguf` library's bit for bit, several times faster, as torch works here in
chunks that stay in the processor's cache and writes each element once.  Used by `GgufCheckpoint`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from store.formats.gguf_types import GGUF_BLOCK_SIZES

_CHUNK_ELEMENTS = 1 << 18
_PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

BlockReader = Callable[[torch.Tensor, torch.Tensor], None]


def dequantize(raw: torch.Tensor, type_name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Flat uint8 `raw` of a type in `READABLE_GGUF_TYPES` -> a CPU tensor of `shape`.

    Quantised types give a new float32 tensor; plain ones a view of `raw` in their own dtype.
    """
    if type_name in _PLAIN_DTYPES:
        return raw.view(dequantized_dtype(type_name)).view(shape)
    block_elements, block_bytes = GGUF_BLOCK_SIZES[type_name]
    read_blocks = _BLOCK_READERS[type_name]
    blocks = raw.view(-1, block_bytes)
    values = torch.empty(math.prod(shape), dtype=torch.float32, device="cpu")
    step = _CHUNK_ELEMENTS // block_elements
    for source, target in zip(blocks.split(step), values.view(-1, block_elements).split(step), strict=True):
        read_blocks(source, target)
    return values.view(shape)


def dequantized_dtype(type_name: str) -> torch.dtype:
    """What `dequantize` makes of a type in `READABLE_GGUF_TYPES`."""
    return _PLAIN_DTYPES.get(type_name, torch.float32)


def _halves(blocks: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """`count` float16 numbers from byte `start` of each block: float32 [N, count]."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _put_nibbles(packed: torch.Tensor, values: torch.Tensor) -> None:
    """Low then high half of each byte: packed [..., P] -> values [..., 2, P]."""
    values.select(-2, 0).copy_(packed & 15)
    values.select(-2, 1).copy_(packed >> 4)


def _put_fifth_bits(bits: torch.Tensor, values: torch.Tensor) -> None:
    """Add 16 where the bit is set, bit j of four little-endian bytes to element j: bits [N, 4] -> values [N, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device="cpu")
    spread = (bits.unsqueeze(2) >> shifts) & 1
    values.add_(spread.flatten(1), alpha=16)


def _read_q4_0(blocks: torch.Tensor, values: torch.Tensor) -> None:
    _put_nibbles(blocks[:, 2:], values.view(-1, 2, 16))
    values.sub_(8).mul_(_halves(blocks, 0, 1))


def _read_q4_1(blocks: torch.Tensor, values: torch.Tensor) -> None:
    scale, minimum = _halves(blocks, 0, 2).split(1, dim=1)
    _put_nibbles(blocks[:, 4:], values.view(-1, 2, 16))
    values.mul_(scale).add_(minimum)


def _read_q5_0(blocks: torch.Tensor, values: torch.Tensor) -> None:
    _put_nibbles(blocks[:, 6:], values.view(-1, 2, 16))
    _put_fifth_bits(blocks[:, 2:6], values)
    values.sub_(16).mul_(_halves(blocks, 0, 1))


def _read_q5_1(blocks: torch.Tensor, values: torch.Tensor) -> None:
    scale, minimum = _halves(blocks, 0, 2).split(1, dim=1)
    _put_nibbles(blocks[:, 8:], values.view(-1, 2, 16))
    _put_fifth_bits(blocks[:, 4:8], values)
    values.mul_(scale).add_(minimum)


def _read_q8_0(blocks: torch.Tensor, values: torch.Tensor) -> None:
    values.copy_(blocks[:, 2:].view(torch.int8))
    values.mul_(_halves(blocks, 0, 1))


def k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum of the eight groups of a K block, each float32 [N, 8, 1].

    Two halves, then twelve bytes of 6-bit numbers: scales 0-3 and minima 0-3 lie in the low
    bits of bytes 0-7; scales and minima 4-7 have their low four bits in bytes 8-11 and their
    high two in the top bits of bytes 0-7.
    """
    scale, minimum = _halves(blocks, 0, 2).split(1, dim=1)
    first, second, rest = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (rest >> 4) | ((second >> 2) & 48)), dim=1)
    return (scale * scales).unsqueeze(2), (minimum * minima).unsqueeze(2)


def _read_q4_k(blocks: torch.Tensor, values: torch.Tensor) -> None:
    scales, minima = k_scales(blocks)
    _put_nibbles(blocks[:, 16:].view(-1, 4, 32), values.view(-1, 4, 2, 32))
    values.view(-1, 8, 32).mul_(scales).sub_(minima)


def _read_q5_k(blocks: torch.Tensor, values: torch.Tensor) -> None:
    scales, minima = k_scales(blocks)
    groups = values.view(-1, 8, 32)
    _put_nibbles(blocks[:, 48:].view(-1, 4, 32), values.view(-1, 4, 2, 32))
    shifts = torch.arange(8, dtype=torch.uint8, device="cpu").view(8, 1)
    groups.add_((blocks[:, None, 16:48] >> shifts) & 1, alpha=16)
    groups.mul_(scales).sub_(minima)


def _read_q6_k(blocks: torch.Tensor, values: torch.Tensor) -> None:
    """Low nibbles in 128 bytes, high bit pairs in 64, sixteen int8 scales, one half."""
    scales = _halves(blocks, 208, 1) * blocks[:, 192:208].view(torch.int8)
    _put_nibbles(blocks[:, :128].view(-1, 2, 64), values.view(-1, 2, 2, 64))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device="cpu").view(4, 1)
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3
    values.view(-1, 2, 4, 32).add_(high, alpha=16)
    values.view(-1, 16, 16).sub_(32).mul_(scales.unsqueeze(2))


_BLOCK_READERS: dict[str, BlockReader] = {
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q5_0": _read_q5_0,
    "Q5_1": _read_q5_1,
    "Q8_0": _read_q8_0,
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q5_k,
    "Q6_K": _read_q6_k,
}

"""The codes of GGUF blocks stand for the numbers that the dequantiser gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.api.architectures import READABLE_GGUF_TYPES
from engine.api.errors import BrokenCheckpoint
from engine.layers.packed_weight import CODINGS, Bits, Coding, pack
from engine.loading.gguf_codes import code_rows, coding_of
from engine.loading.gguf_dequantize import dequantize
from store.formats.gguf_types import GGUF_BLOCK_SIZES

SHAPE = (20, 512)
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
HALVES |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
EXACT = {
    "Q4_0": Coding(4, is_symmetric=True),
    "Q4_1": Coding(4, is_symmetric=False),
    "Q5_0": Coding(8, is_symmetric=True),
    "Q5_1": Coding(8, is_symmetric=False),
    "Q8_0": Coding(8, is_symmetric=True),
}


def random_blocks(type_name: str, scale: float = 0.02) -> torch.Tensor:
    """Random bits in every field but the float16 numbers, which are those of real weights."""
    elements, block_bytes = GGUF_BLOCK_SIZES[type_name]
    num_blocks = SHAPE[0] * SHAPE[1] // elements
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    for start in HALVES[type_name]:
        numbers = rng.normal(scale=scale, size=(num_blocks, 1)).astype(np.float16)
        data[:, start : start + 2] = numbers.view(np.uint8)
    return torch.from_numpy(data).flatten()


@pytest.mark.parametrize("type_name", EXACT)
def test_groups_of_32_keep_their_weights(type_name: str) -> None:
    raw = random_blocks(type_name)
    rows = code_rows("w", raw, type_name, SHAPE)
    assert rows.coding == coding_of(type_name) == EXACT[type_name]
    assert torch.equal(rows.dequantize(), dequantize(raw, type_name, SHAPE))
    assert torch.equal(pack([rows]).dequantize(), dequantize(raw, type_name, SHAPE))


@pytest.mark.parametrize(("type_name", "bits"), [("Q4_K", 4), ("Q5_K", 8)])
def test_k_groups_keep_their_codes_and_scales_as_float16_has_them(type_name: str, bits: Bits) -> None:
    raw = random_blocks(type_name, scale=0.001)
    rows, expected = code_rows("w", raw, type_name, SHAPE), dequantize(raw, type_name, SHAPE)
    assert rows.coding == coding_of(type_name) == Coding(bits, is_symmetric=False)
    assert rows.minimums is not None
    # Each of scale and minimum is off by at most 2^-11 of itself.
    codes = rows.widened().codes.float()
    scales, minimums = rows.scales.float().unsqueeze(2), rows.minimums.float().unsqueeze(2)
    bound = ((codes * scales).abs() + minimums.abs()).flatten(1) * 2**-11 + 1e-7
    assert ((rows.dequantize() - expected).abs() <= bound).all()


def test_groups_of_16_are_quantised_anew() -> None:
    raw = random_blocks("Q6_K")
    rows, expected = code_rows("w", raw, "Q6_K", SHAPE), dequantize(raw, "Q6_K", SHAPE)
    assert rows.coding == coding_of("Q6_K") == Coding(8, is_symmetric=True)
    steps = rows.scales.float().repeat_interleave(32, dim=1)
    assert ((rows.dequantize() - expected).abs() <= 0.501 * steps).all()


def test_every_supported_type_is_plain_or_coded() -> None:
    found = {name: coding_of(name) for name in READABLE_GGUF_TYPES}
    assert [name for name, coding in found.items() if coding is None] == ["F32", "F16", "BF16"]
    assert {coding for coding in found.values() if coding} == set(CODINGS)


def test_blocks_across_rows_are_refused() -> None:
    with pytest.raises(BrokenCheckpoint, match="whole number of Q8_0 blocks"):
        code_rows("w", torch.zeros(34 * 3, dtype=torch.uint8), "Q8_0", (2, 48))


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_K", "Q6_K"])
def test_scales_that_are_not_finite_are_refused(type_name: str) -> None:
    raw = random_blocks(type_name)
    start = HALVES[type_name][0]
    raw[start : start + 2] = torch.tensor([torch.inf], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(BrokenCheckpoint, match=r"'w'.*finite"):
        code_rows("w", raw, type_name, SHAPE)

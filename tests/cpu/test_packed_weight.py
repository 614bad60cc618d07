"""Packed matrices hold the weights they were packed from, in the documented byte order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layers.packed_weight import Bits, CodedRows, PackedWeight, pack

any_bits = st.sampled_from([4, 8])


def coded_rows(bits: Bits, out_features: int, in_features: int, seed: int = 0) -> CodedRows:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-in_features // 32)
    codes = torch.randint(256, (out_features, groups, 4 * bits), generator=generator, dtype=torch.uint8)
    scales, minimums = torch.randn((2, out_features, groups), generator=generator).half()
    return CodedRows(bits, in_features, codes, scales, minimums)


@given(
    parts=st.lists(st.tuples(any_bits, st.integers(1, 70)), min_size=1, max_size=4),
    in_features=st.integers(1, 100),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=60)
def test_packed_weights_are_those_of_the_parts(parts: list[tuple[Bits, int]], in_features: int, seed: int) -> None:
    rows = [coded_rows(bits, size, in_features, seed + index) for index, (bits, size) in enumerate(parts)]
    packed = pack(rows)
    expected = torch.cat([part.dequantize() for part in rows])
    assert torch.equal(packed.dequantize(), expected)
    assert (packed.out_features, packed.in_features) == tuple(expected.shape)
    assert packed.nbytes == sum(segment.data.nbytes for segment in packed.segments)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_scales_and_minimums_lie_where_the_layout_says(bits: Bits) -> None:
    rows = coded_rows(bits, 40, 70)
    codes = rows.widened().codes
    (matrix,) = pack([rows]).segments
    assert tuple(matrix.data.shape) == (3, 3, 576 if bits == 8 else 320)
    for output, group, position in [(0, 0, 0), (17, 1, 31), (39, 2, 5), (25, 0, 16), (31, 1, 15)]:
        record = matrix.data[output // 16, group]
        quad, lane = divmod(position, 4)[0], output % 16
        if bits == 8:
            code = int(record[quad * 64 + lane * 4 + position % 4])
        else:
            byte = int(record[quad % 4 * 64 + lane * 4 + position % 4])
            code = byte & 15 if quad < 4 else byte >> 4
        assert code == int(codes[output, group, position])
        numbers = record[-64:].view(torch.float16)
        assert numbers[lane] == rows.scales[output, group]
        assert numbers[16 + lane] == rows.minimums[output, group]


@pytest.mark.parametrize("bits", [4, 8])
def test_outputs_are_padded_with_zeros(bits: Bits) -> None:
    (matrix,) = pack([coded_rows(bits, 17, 32)]).segments
    codes, numbers = matrix.data[1, 0].split([matrix.data.shape[2] - 64, 64])
    assert not codes.view(-1, 16, 4)[:, 1:].any()
    assert not numbers.view(torch.float16).view(2, 16)[:, 1:].any()


def segments_of(*parts: tuple[Bits, int]) -> list[tuple[int, int]]:
    weight: PackedWeight = pack([coded_rows(bits, size, 64) for bits, size in parts])
    return [(segment.bits, segment.out_features) for segment in weight.segments]


def test_neighbours_of_equal_bits_become_one_segment() -> None:
    assert segments_of((4, 32), (4, 16), (8, 16), (4, 5)) == [(4, 48), (8, 16), (4, 5)]
    assert segments_of((8, 16), (8, 7)) == [(8, 23)]


def test_a_part_that_ends_within_a_tile_makes_one_segment_of_bytes() -> None:
    assert segments_of((4, 20), (4, 16)) == [(8, 36)]
    assert segments_of((4, 16), (4, 20)) == [(4, 36)]


def test_rows_can_be_dequantised_apart() -> None:
    rows = coded_rows(4, 50, 40)
    (matrix,) = pack([rows]).segments
    wanted = torch.tensor([49, 0, 17, 17], dtype=torch.int32)
    assert torch.equal(matrix.dequantize_rows(wanted), rows.dequantize()[wanted.long()])


def test_rearranged_rows_keep_their_weights() -> None:
    rows = coded_rows(4, 6, 40)
    assert torch.equal(rows.with_rows(lambda values: values.flip(0)).dequantize(), rows.dequantize().flip(0))


def test_packing_on_the_meta_device_gives_the_size() -> None:
    real = [coded_rows(4, 32, 100), coded_rows(8, 9, 100)]
    empty = [
        CodedRows(part.bits, 100, part.codes.to("meta"), part.scales.to("meta"), part.minimums.to("meta"))
        for part in real
    ]
    assert pack(empty).nbytes == pack(real).nbytes

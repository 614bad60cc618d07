"""Packed matrices hold the weights they were packed from, in the documented byte order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layers.packed_weight import CODINGS, CodedRows, Coding, PackedMatrix, PackedWeight, empty_rows, pack

any_coding = st.sampled_from(CODINGS)
each_coding = pytest.mark.parametrize("coding", CODINGS, ids=str)
INT4, INT8 = Coding(4, is_symmetric=False), Coding(8, is_symmetric=False)
SYMMETRIC4, SYMMETRIC8 = Coding(4, is_symmetric=True), Coding(8, is_symmetric=True)
RECORD_BYTES = {INT4: 320, INT8: 576, SYMMETRIC4: 288, SYMMETRIC8: 544}


def coded_rows(coding: Coding, out_features: int, in_features: int, seed: int = 0) -> CodedRows:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-in_features // 32)
    codes = torch.randint(256, (out_features, groups, 4 * coding.bits), generator=generator, dtype=torch.uint8)
    scales, minimums = torch.randn((2, out_features, groups), generator=generator).half()
    return CodedRows(coding.bits, in_features, codes, scales, None if coding.is_symmetric else minimums)


@given(
    parts=st.lists(st.tuples(any_coding, st.integers(1, 70)), min_size=1, max_size=4),
    in_features=st.integers(1, 100),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_packed_weights_are_those_of_the_parts(parts: list[tuple[Coding, int]], in_features: int, seed: int) -> None:
    rows = [coded_rows(coding, size, in_features, seed + index) for index, (coding, size) in enumerate(parts)]
    packed = pack(rows)
    expected = torch.cat([part.dequantize() for part in rows])
    # Where symmetric parts share a segment with others, their zeros become minimums, rounded to float16.
    torch.testing.assert_close(packed.dequantize(), expected, atol=1e-6, rtol=1e-6)
    assert (packed.out_features, packed.in_features) == tuple(expected.shape)
    assert packed.nbytes == sum(segment.data.nbytes for segment in packed.segments)


@each_coding
def test_codes_scales_and_minimums_lie_where_the_layout_says(coding: Coding) -> None:
    rows = coded_rows(coding, 40, 70)
    codes = rows.with_minimums().widened().codes
    (matrix,) = pack([rows]).segments
    assert tuple(matrix.data.shape) == (3, 3, RECORD_BYTES[coding])
    for output, group, position in [(0, 0, 0), (17, 1, 31), (39, 2, 5), (25, 0, 16), (31, 1, 15)]:
        record = matrix.data[output // 16, group]
        quad, lane = divmod(position, 4)[0], output % 16
        if coding.bits == 8:
            code = int(record[quad * 64 + lane * 4 + position % 4])
        else:
            byte = int(record[quad % 4 * 64 + lane * 4 + position % 4])
            code = byte & 15 if quad < 4 else byte >> 4
        assert code == int(codes[output, group, position])
        numbers = record[64 * coding.bits :].view(torch.float16)
        assert numbers[lane] == rows.scales[output, group]
        if rows.minimums is not None:
            assert numbers[16 + lane] == rows.minimums[output, group]


@each_coding
def test_outputs_are_padded_with_zeros(coding: Coding) -> None:
    (matrix,) = pack([coded_rows(coding, 17, 32)]).segments
    codes, numbers = matrix.data[1, 0].tensor_split([64 * coding.bits])
    assert not codes.view(-1, 16, 4)[:, 1:].any()
    assert not numbers.view(torch.float16).view(-1, 16)[:, 1:].any()


def segments_of(*parts: tuple[Coding, int]) -> list[tuple[Coding, int]]:
    weight: PackedWeight = pack([coded_rows(coding, size, 64) for coding, size in parts])
    return [(segment.coding, segment.out_features) for segment in weight.segments if isinstance(segment, PackedMatrix)]


def test_neighbours_of_one_coding_become_one_segment() -> None:
    assert segments_of((INT4, 32), (INT4, 16), (INT8, 16), (INT4, 5)) == [(INT4, 48), (INT8, 16), (INT4, 5)]
    assert segments_of((INT8, 16), (INT8, 7)) == [(INT8, 23)]
    assert segments_of((SYMMETRIC4, 16), (INT4, 16)) == [(SYMMETRIC4, 16), (INT4, 16)]


def test_a_part_that_ends_within_a_tile_makes_one_segment_of_bytes() -> None:
    assert segments_of((INT4, 20), (INT4, 16)) == [(INT8, 36)]
    assert segments_of((INT4, 16), (INT4, 20)) == [(INT4, 36)]
    assert segments_of((SYMMETRIC4, 20), (SYMMETRIC4, 16)) == [(SYMMETRIC8, 36)]
    assert segments_of((SYMMETRIC4, 20), (INT8, 16)) == [(INT8, 36)]


def test_rows_can_be_dequantised_apart() -> None:
    rows = coded_rows(INT4, 50, 40)
    (matrix,) = pack([rows]).segments
    wanted = torch.tensor([49, 0, 17, 17], dtype=torch.int32)
    assert torch.equal(matrix.dequantize_rows(wanted), rows.dequantize()[wanted.long()])


def test_rearranged_rows_keep_their_weights() -> None:
    rows = coded_rows(INT4, 6, 40)
    assert torch.equal(rows.with_rows(lambda values: values.flip(0)).dequantize(), rows.dequantize().flip(0))


def test_packing_on_the_meta_device_gives_the_size() -> None:
    real = [coded_rows(INT4, 32, 100), coded_rows(SYMMETRIC8, 9, 100)]
    empty = [empty_rows(part.coding, *part.shape, device=torch.device("meta")) for part in real]
    assert pack(empty).nbytes == pack(real).nbytes

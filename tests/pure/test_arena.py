"""Pieces of an arena that are in use at once never overlap, and those that are not share memory."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from engine.cpu.arena import ALIGNMENT, Piece, place

PIECES = st.lists(
    st.builds(
        lambda num_bytes, first, length: Piece(num_bytes, first, first + length),
        st.integers(1, 1000),
        st.integers(0, 20),
        st.integers(0, 6),
    ),
    max_size=30,
)


@given(PIECES)
def test_pieces_in_use_at_once_are_aligned_and_apart_and_within_the_whole(pieces):
    offsets, num_bytes = place(pieces)
    assert len(offsets) == len(pieces)
    spans = [(start, start + piece.num_bytes) for start, piece in zip(offsets, pieces, strict=True)]
    assert all(start % ALIGNMENT == 0 and 0 <= start < end <= num_bytes for start, end in spans)
    for (one, (start, end)), (other, (other_start, other_end)) in combinations(zip(pieces, spans, strict=True), 2):
        if one.first <= other.last and other.first <= one.last:
            assert end <= other_start or other_end <= start


def test_the_whole_is_what_is_in_use_at_once():
    # The two large ones leave a gap that they share, and the small one beside both fits behind it.
    pieces = [Piece(128, 0, 3), Piece(64, 1, 9), Piece(640, 2, 3), Piece(640, 5, 6), Piece(100, 6, 9)]
    offsets, num_bytes = place(pieces)
    assert offsets[2] == offsets[3] == 0
    assert num_bytes == 640 + 128 + 64


def test_nothing_takes_nothing():
    assert place([]) == ([], 0)

"""Stop strings against a naive search on the full text, for texts cut into random pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.stop_strings import StopStrings

# A small alphabet makes overlaps and near misses common.
pieces_of_text = st.lists(st.text("abc", max_size=5), max_size=20)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def naive_match(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """Start, end and stop string of the first match to be completed; the longest of several."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            found = max(completed, key=len)
            return end - len(found), end, found
    return None


@given(pieces_of_text, stop_lists, st.booleans())
def test_equals_a_naive_search_however_the_text_is_cut(pieces: list[str], stops: list[str], include: bool) -> None:
    text = "".join(pieces)
    finder = StopStrings(stops, include_in_output=include)
    shown = "".join([*(finder.push(piece) for piece in pieces), finder.flush()])
    match = naive_match(text, stops)
    if match is None:
        assert (shown, finder.matched) == (text, None)
    else:
        start, end, found = match
        assert (shown, finder.matched) == (text[: end if include else start], found)


@given(pieces_of_text, stop_lists)
def test_holds_back_exactly_what_may_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    finder = StopStrings(stops)
    text, shown = "", ""
    for piece in pieces:
        text += piece
        shown += finder.push(piece)
        if finder.matched is not None:
            return
        held = text[len(shown) :]
        suffixes = [text[start:] for start in range(len(text) + 1)]
        assert shown + held == text
        assert held == next(suffix for suffix in suffixes if any(stop.startswith(suffix) for stop in [*stops, ""]))


def test_a_match_can_span_many_pieces() -> None:
    finder = StopStrings(["\n\nUser:"])
    assert [finder.push(piece) for piece in ("Hi.", "\n", "\nUs", "er", ": more")] == ["Hi.", "", "", "", ""]
    assert finder.matched == "\n\nUser:"


def test_a_near_miss_is_released_as_soon_as_it_fails() -> None:
    finder = StopStrings(["END"])
    assert [finder.push(piece) for piece in ("E", "N", "D", "x")] == ["", "", "", ""]
    finder = StopStrings(["END"])
    assert [finder.push(piece) for piece in ("E", "N", "E", "x")] == ["", "", "EN", "Ex"]


def test_held_text_is_flushed_at_the_end() -> None:
    finder = StopStrings(["END"])
    assert finder.push("the EN") == "the "
    assert finder.flush() == "EN"


@pytest.mark.parametrize(("include", "expected"), [(False, "a"), (True, "a|")])
def test_nothing_follows_a_match(include: bool, expected: str) -> None:
    finder = StopStrings(["|"], include_in_output=include)
    assert finder.push("a|b") == expected
    assert (finder.push("c"), finder.flush(), finder.matched) == ("", "", "|")


def test_a_very_long_stop_string_that_never_completes_loses_nothing() -> None:
    finder = StopStrings(["a" * 5000 + "b"])
    shown = "".join([*(finder.push("a") for _ in range(6000)), finder.flush()])
    assert shown == "a" * 6000

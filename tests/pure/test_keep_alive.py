"""How long a model stays: what people and programs write, and what it means."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.keep_alive import FOREVER, format_keep_alive, granted_keep_alive, parse_keep_alive
from engine.api.errors import InvalidParameter

UNITS_S = {"h": 3600, "m": 60, "s": 1, "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "ns": Fraction(1, 10**9)}


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("300", 300),
        (" 300 ", 300),
        (300, 300),
        (0.5, 0.5),
        ("250ms", 0.25),
        (".5s", 0.5),
        ("1.s", 1),
        ("+5m", 300),
        ("24h", 86400),
        (0, 0),
        ("0", 0),
        ("0s", 0),
        ("-0", 0),
        (-0.0, 0),
        (-1, FOREVER),
        ("-1", FOREVER),
        ("-1s", FOREVER),
        ("-1h30m", FOREVER),
        (-0.1, FOREVER),
        (10**400, FOREVER),
        (math.inf, FOREVER),
    ],
)
def test_ollamas_grammar(written: str | int | float, seconds: float) -> None:
    assert parse_keep_alive(written) == seconds


@pytest.mark.parametrize(
    "written", ["", " ", "m", "5 m", "5M", "1d", "5mm", "--5m", "5m-", "1e3", "inf", "nan", ".", ".s", "٥m", "1,5h"]
)
def test_what_is_no_duration_is_refused_with_an_example(written: str) -> None:
    with pytest.raises(InvalidParameter, match="write it like 5m or 1h30m") as refused:
        parse_keep_alive(written)
    assert (refused.value.param, refused.value.status) == ("keep_alive", 400)


@pytest.mark.parametrize("written", [True, math.nan, "9" * 10_000, "1h" * 10_000])
def test_neither_truth_values_nor_endless_texts_are_durations(written: str | float) -> None:
    with pytest.raises(InvalidParameter) as refused:
        parse_keep_alive(written)
    assert len(refused.value.message) < 250


@given(st.text(max_size=70) | st.text("0123456789.+-hmsunµ", max_size=20) | st.integers() | st.floats())
def test_anything_is_a_duration_or_is_refused(written: str | int | float) -> None:
    try:
        seconds = parse_keep_alive(written)
    except InvalidParameter:
        return
    assert seconds >= 0
    assert parse_keep_alive(seconds) == seconds, "what is read already stays as it is"


@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(sorted(UNITS_S))), min_size=1, max_size=4))
def test_parts_add_up(parts: list[tuple[int, str]]) -> None:
    written = "".join(f"{count}{unit}" for count, unit in parts)
    total = sum((count * Fraction(UNITS_S[unit]) for count, unit in parts), Fraction())

    assert parse_keep_alive(written) == float(total)
    assert parse_keep_alive(f"-{written}") == (FOREVER if total else 0)


@given(st.integers(0, 10**12).map(lambda milliseconds: milliseconds / 1000) | st.just(FOREVER))
def test_what_is_shown_can_be_written(seconds: float) -> None:
    assert parse_keep_alive(format_keep_alive(seconds)) == pytest.approx(seconds, abs=5e-4)


def test_shown_as_people_write_it() -> None:
    assert [format_keep_alive(seconds) for seconds in (0, 90, 5400, 0.25, FOREVER)] == [
        "0",
        "1m30s",
        "1h30m",
        "250ms",
        "-1",
    ]


def test_a_client_gets_no_more_than_is_allowed() -> None:
    assert granted_keep_alive(None, 60) is None
    assert granted_keep_alive(-1, 60) == 60
    assert granted_keep_alive("5s", 60) == 5
    assert granted_keep_alive("-1", FOREVER) == FOREVER

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.event_stream import iter_json_lines, iter_lines, iter_sse_data


async def chunked(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def sse(body: bytes) -> list[bytes]:
    return [data async for data in iter_sse_data(iter_lines(chunked([body])))]


@given(st.lists(st.text().map(lambda text: text.replace("\n", "").replace("\r", ""))), st.integers(1, 7))
async def test_lines_come_out_whole_however_the_body_is_cut(lines: list[str], size: int) -> None:
    body = "".join(f"{line}\n" for line in lines).encode()
    chunks = [body[i : i + size] for i in range(0, len(body), size)]
    assert [line.decode() async for line in iter_lines(chunked(chunks))] == lines


async def test_only_lf_ends_a_line() -> None:
    body = "a\u2028b\x0bc\x85d\r\ne".encode()
    assert [line.decode() async for line in iter_lines(chunked([body]))] == ["a\u2028b\x0bc\x85d", "e"]


@pytest.mark.parametrize(
    ("body", "events"),
    [
        (b"data: 1\n\ndata: 2\n\n", [b"1", b"2"]),
        (b": ping\n\ndata:1\n\n", [b"1"]),
        (b"event: x\nid: 3\ndata: a\ndata: b\n\n", [b"a\nb"]),
        (b"data: 1\r\n\r\n", [b"1"]),
        (b"data: whole\n\ndata: cut", [b"whole"]),
        (b"\n\n\n", []),
    ],
)
async def test_server_sent_events(body: bytes, events: list[bytes]) -> None:
    assert await sse(body) == events


async def test_blank_json_lines_are_skipped() -> None:
    lines = iter_lines(chunked([b'{"a":1}\n\n  \n{"b":2}']))
    assert [line async for line in iter_json_lines(lines)] == [b'{"a":1}', b'{"b":2}']

"""Byte chunks of a streamed HTTP body → lines → Server-Sent Events or JSON lines.

Lines end at LF only.  Text-mode splitters also break at U+2028, U+0085 and others, which JSON
strings may hold unescaped, so splitting happens on bytes.  Knows neither HTTP nor what the
events mean; used by `app.client`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator


async def iter_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of a body cut into arbitrary chunks, without their LF or CRLF.

    An unterminated last line is yielded too.
    """
    pending: list[bytes] = []
    async for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        pending.append(first)
        for part in rest:
            yield b"".join(pending).removesuffix(b"\r")
            pending = [part]
    if last := b"".join(pending):
        yield last.removesuffix(b"\r")


async def iter_sse_data(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each Server-Sent Event; comments and other fields are skipped.

    Several `data:` lines of one event are joined by LF.  An event that the end of the body
    cuts off before its blank line is dropped, as the specification says.
    Source: WHATWG HTML, section 9.2.6, "Interpreting an event stream".
    """
    data: list[bytes] = []
    async for line in lines:
        if not line:
            if data:
                yield b"\n".join(data)
                data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))


async def iter_json_lines(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the non-blank lines: one JSON value each."""
    async for line in lines:
        if line.strip():
            yield line

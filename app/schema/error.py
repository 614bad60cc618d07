"""The error object that every route answers with; OpenAI's shape, msgspec structs without behaviour."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True):
    """`param` names the request field at fault; `code` is stable between releases."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail

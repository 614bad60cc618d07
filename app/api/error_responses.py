"""Litestar's exception handlers: whatever a route raises leaves as an OpenAI-shaped error.

Knows Litestar's own exceptions (unknown route, wrong method, oversized body); all others are
described by `app.errors`.  Used by `app.server`.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from litestar import Request, Response
from litestar.enums import MediaType
from litestar.exceptions import HTTPException

from app.api.disconnect import ClientGone
from app.errors import AppError, describe, error_body
from app.schema.error import ErrorBody

_FRAMEWORK_MESSAGES = {
    404: "There is no such route; /schema lists those that exist.",
    405: "This route does not take this method; /schema lists those it takes.",
    413: "The request body is over the limit; send less, or raise request_body_limit_bytes.",
}


def answer_error(request: Request[Any, Any, Any], error: Exception) -> Response[ErrorBody]:
    """The response for an error one of our layers raised, or for a bug."""
    status, body = describe(error, f"{request.method} {request.url.path}")
    headers = error.headers if isinstance(error, AppError) else {}
    return Response(body, status_code=status, media_type=MediaType.JSON, headers=headers)


def answer_framework_error(_: Request[Any, Any, Any], error: HTTPException) -> Response[ErrorBody]:
    """The response for an error the framework raised before a handler ran."""
    status = error.status_code
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    body = error_body(status, _FRAMEWORK_MESSAGES.get(status, error.detail), code)
    return Response(body, status_code=status, media_type=MediaType.JSON, headers=dict(error.headers or {}))


def answer_nobody(_request: Request[Any, Any, Any], _error: ClientGone) -> Response[None]:
    """Nothing is sent to a client that left; the status is the customary one for logs."""
    return Response(None, status_code=499)


EXCEPTION_HANDLERS: dict[int | type[Exception], Any] = {
    ClientGone: answer_nobody,
    HTTPException: answer_framework_error,
    Exception: answer_error,
}

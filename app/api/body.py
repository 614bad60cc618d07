"""`JsonBody`: how a request body becomes a msgspec struct, with errors that name the field.

Litestar's own conversion is lax (it takes "0.5" for a number) and reports all errors alike,
so this DTO decodes strictly.  The annotation of `data` still gives the OpenAPI schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator
from typing import Any

import msgspec
from litestar.dto import AbstractDTO, DTOFieldDefinition
from litestar.openapi.spec import Reference, Schema
from litestar.typing import FieldDefinition

from app.errors import BadRequest, UnsupportedMediaType

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_PATH = re.compile(r" - at (`key` in )?`\$\.?(?P<path>[^`]*)`$")


def decode_body(raw: bytes, model: type[Any]) -> Any:
    """Strictly decode JSON into `model`; raises `BadRequest` with `param` where a field is at fault."""
    try:
        return msgspec.json.decode(raw, type=model)
    except msgspec.ValidationError as error:
        raise _describe(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if param := _non_finite_field(raw):
            raise BadRequest(f"{param} must be a finite number.", param=param) from error
        raise BadRequest(f"The request body is not valid JSON ({error}); correct it.") from error


def _non_finite_field(raw: bytes) -> str | None:
    """The top-level field that holds NaN or Infinity: no JSON, but what Python's encoder writes for them."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    fields = body.items() if isinstance(body, dict) else ()
    return next((name for name, value in fields if isinstance(value, float) and not math.isfinite(value)), None)


def _describe(text: str) -> BadRequest:
    located = _PATH.search(text)
    parent = located["path"] if located else ""
    reason = text[: located.start()] if located else text
    for pattern, verdict in (
        (_UNKNOWN_FIELD, "is not a known parameter; leave it out"),
        (_MISSING_FIELD, "is required"),
    ):
        if match := pattern.search(reason):
            param = f"{parent}.{match['name']}" if parent else match["name"]
            return BadRequest(f"{param} {verdict}.", param=param)
    if not parent:
        return BadRequest(f"The request body is not right: {reason}.")
    return BadRequest(f"{parent} is not right: {reason[:1].lower()}{reason[1:]}.", param=parent)


class JsonBody(AbstractDTO[Any]):
    """Give it to a route as `dto=JsonBody`; the struct comes from the annotation of `data`."""

    @classmethod
    def create_for_field_definition(cls, field_definition: FieldDefinition, handler_id: str, *_: Any) -> None:
        """Nothing to prepare: msgspec keeps its own decoders."""

    @classmethod
    def create_openapi_schema(
        cls, field_definition: FieldDefinition, handler_id: str, schema_creator: Any
    ) -> Reference | Schema:
        schema: Reference | Schema = schema_creator.for_field_definition(field_definition)
        return schema

    @classmethod
    def generate_field_definitions(cls, model_type: type[Any]) -> Generator[DTOFieldDefinition, None, None]:
        yield from ()

    @classmethod
    def detect_nested_field(cls, field_definition: FieldDefinition) -> bool:
        return False

    def decode_bytes(self, value: bytes) -> Any:
        content_type = self.asgi_connection.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise UnsupportedMediaType("The body must be JSON; send the header `Content-Type: application/json`.")
        field = self.asgi_connection.route_handler.parsed_data_field
        assert field is not None
        return decode_body(value, field.annotation)

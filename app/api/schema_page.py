"""The page at /schema: every route with its parameters, as plain HTML made from the OpenAPI document.

Litestar's own pages load their viewer from other hosts, which shows nothing on a machine without
internet and runs foreign scripts in the daemon's origin.  This one needs neither network nor
script.  The document itself is at /schema/openapi.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from litestar import Request
from litestar.openapi.plugins import OpenAPIRenderPlugin

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem;
       color-scheme: light dark; }
h2 { font-size: 1rem; margin: 2rem 0 .3rem; } code, h2 { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; } td { padding: .15rem .8rem .15rem 0; vertical-align: top; }
td:last-child { opacity: .75; } p { margin: .3rem 0; }
"""


class SchemaPage(OpenAPIRenderPlugin):
    """Renders the OpenAPI document without scripts."""

    def __init__(self) -> None:
        super().__init__(path="/")

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        title = escape(f"{openapi_schema['info']['title']} {openapi_schema['info']['version']}")
        return "".join(
            (
                f"<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>",
                f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
                f"<p>Machine-readable: <a href='{escape(self.get_openapi_json_route(request))}'>openapi.json</a></p>",
                *_routes(openapi_schema),
                "</body></html>",
            )
        ).encode()


def _routes(document: dict[str, Any]) -> Iterator[str]:
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"<h2>{escape(method.upper())} {escape(path)}</h2>"
            if description := operation.get("description"):
                yield f"<p>{escape(description)}</p>"
            content = operation.get("requestBody", {}).get("content", {})
            for media in content.values():
                yield _fields(_resolved(media["schema"], schemas))
            answers = (f"{status}: {answer['description']}" for status, answer in operation["responses"].items())
            yield f"<p>{'<br>'.join(escape(answer) for answer in answers)}</p>"


def _fields(schema: dict[str, Any]) -> str:
    """The properties of a request body as rows: name, type, whether it must be there."""
    required = set(schema.get("required", ()))
    rows = (
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type_name(field))}</td>"
        f"<td>{'required' if name in required else ''}</td></tr>"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<table>{''.join(rows)}</table>"


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    return schemas[reference.rsplit("/", 1)[-1]] if reference else schema


def _type_name(schema: dict[str, Any]) -> str:
    """`integer`, `array of string`, `string or null`, `StreamOptions`."""
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[-1])
    if "oneOf" in schema:
        return " or ".join(_type_name(option) for option in schema["oneOf"])
    if "enum" in schema:
        return " or ".join(repr(value) for value in schema["enum"])
    if schema.get("type") == "array" and "items" in schema:
        return f"array of {_type_name(schema['items'])}"
    return str(schema.get("type", "any"))

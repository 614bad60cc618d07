"""The search of the model hub and of mirrors that speak it: which repositories hold models of some words.

What a hub says of its repositories is only shown: names are checked, numbers bounded, other text is dropped.
Called by `store.sources.lookup`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import msgspec

from store.errors import HubUnreachable, InvalidName
from store.names import RepoId
from store.shape import identifier
from store.sources.json_api import ApiAnswer, ApiFailure, ApiRequest, get

_EXPANDED = ("downloads", "tags", "gated", "pipeline_tag", "config", "safetensors", "gguf")
"""What an answer shall tell of each repository; not every mirror understands the question."""

_DTYPE_BYTES = {
    "F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_KINDS = {"feature-extraction": "embed", "sentence-similarity": "embed", "text-ranking": "rerank"}
_MOST = 1 << 50
_FURTHER = 3
"""How many times the wanted number is asked for: most repositories hold formats that are not for this product."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A repository of the hub; what the hub does not tell is None.

    `stored_bytes` are the weights in safetensors files; a repository of GGUF files alone has many sizes.  `kind` is
    "embed" or "rerank" for models that are made for that.
    """

    repo: RepoId
    downloads: int | None = None
    parameters: int | None = None
    stored_bytes: int | None = None
    model_type: str | None = None
    classes: tuple[str, ...] = ()
    is_quantized: bool = False
    is_gguf: bool = False
    gated: bool = False
    license: str | None = None
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """What `endpoint` found, the most fetched first."""

    endpoint: str
    models: tuple[FoundModel, ...]


class _Entry(msgspec.Struct):
    id: str = ""
    model_id: str = msgspec.field(default="", name="modelId")
    downloads: object = None
    tags: object = None
    gated: object = None
    pipeline_tag: object = None
    config: object = None
    safetensors: object = None
    gguf: object = None


def search_models(endpoint: str, words: str, limit: int, token: str | None, request: ApiRequest) -> SearchAnswer:
    """Up to `limit` repositories with weights that could be read.  Raises HubUnreachable."""
    try:
        answer = _ask(endpoint, words, limit * _FURTHER, token, request)
        if answer.status != 200:
            raise ApiFailure(f"answered with HTTP status {answer.status}")
        return SearchAnswer(endpoint, read_models(answer.body)[:limit])
    except (ApiFailure, msgspec.MsgspecError, RecursionError, ValueError) as error:
        reason = error if isinstance(error, ApiFailure) else "gave no usable answer to a search"
        raise HubUnreachable(f"{endpoint} {reason}; try again later.") from error


def read_models(body: bytes) -> tuple[FoundModel, ...]:
    """The repositories of an answer that hold weights which could be read, the most fetched first.

    Raises MsgspecError or RecursionError for what is no list of repositories.
    """
    entries = msgspec.json.decode(body, type=list[_Entry])
    found = [model for entry in entries if (model := _model(entry))]
    return tuple(sorted(found, key=lambda model: model.downloads or 0, reverse=True))


def _ask(endpoint: str, words: str, limit: int, token: str | None, request: ApiRequest) -> ApiAnswer:
    query = [("search", words), ("sort", "downloads"), ("direction", "-1"), ("limit", str(limit))]
    expanded = query + [("expand", name) for name in _EXPANDED]
    answer = get(f"{endpoint}/api/models?{urlencode(expanded)}", token, request)
    if answer.status in (400, 422):
        return get(f"{endpoint}/api/models?{urlencode(query)}", token, request)
    if token is not None and answer.status == 401:
        # An expired token turns even a search away.
        return get(f"{endpoint}/api/models?{urlencode(expanded)}", None, request)
    return answer


def _model(entry: _Entry) -> FoundModel | None:
    """A repository as far as it can be believed; None for one without a proper name or without weights to read."""
    tags = [tag for tag in _list(entry.tags) if isinstance(tag, str)]
    config, gguf = _mapping(entry.config), _mapping(entry.gguf)
    is_gguf = (bool(gguf) or "gguf" in tags) and "safetensors" not in tags
    if tags and not is_gguf and "safetensors" not in tags:
        return None
    try:
        repo = RepoId(entry.id or entry.model_id)
    except InvalidName:
        return None
    if repo.registry != "hub":
        return None
    counts = _mapping(_mapping(entry.safetensors).get("parameters"))
    sizes = {name: count for name, value in counts.items() if (count := _number(value)) is not None}
    is_known = bool(sizes) and set(sizes) <= set(_DTYPE_BYTES)
    licenses = [tag.removeprefix("license:") for tag in tags if tag.startswith("license:")]
    pipeline = entry.pipeline_tag
    return FoundModel(
        repo=repo,
        downloads=_number(entry.downloads),
        parameters=_number(_mapping(entry.safetensors).get("total")) or _number(gguf.get("total")),
        stored_bytes=sum(_DTYPE_BYTES[name] * count for name, count in sizes.items()) if is_known else None,
        model_type=identifier(gguf.get("architecture")) or identifier(config.get("model_type")),
        classes=() if is_gguf else tuple(filter(None, map(identifier, _list(config.get("architectures"))))),
        is_quantized=bool(config.get("quantization_config")) and not is_gguf,
        is_gguf=is_gguf,
        gated=bool(entry.gated),
        license=identifier(licenses[0]) if licenses else None,
        kind=_KINDS.get(pipeline) if isinstance(pipeline, str) else None,
    )


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST else None

"""Bodies of POST /v1/embeddings (OpenAI's dialect) and POST /pooling (vLLM's): msgspec structs, no behaviour.

Requests refuse fields they do not list.  None means "not given" for every optional field.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

EncodingFormat = Literal["float", "base64"]
InputType = Literal["query", "document", "passage", "search_query", "search_document"]


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`input` is a text, a list of texts, a list of token ids, or a list of such lists.

    Beyond OpenAI's fields: `truncate_prompt_tokens` has the end of a longer text left out, -1 at what the model takes,
    which is also what `truncate` means; `input_type`, `prompt_name` or `instruction` choose the prompt that goes before
    each text; `keep_alive` is how long the model stays in memory afterwards, in Ollama's grammar.
    """

    model: str
    input: str | tuple[str | int | tuple[int, ...], ...]
    dimensions: int | None = None
    encoding_format: EncodingFormat | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncate: bool | None = None
    input_type: InputType | None = None
    prompt_name: str | None = None
    instruction: str | None = None
    keep_alive: str | int | float | None = None

    add_special_tokens: Any = None
    normalize: Any = None
    priority: Any = None


class PoolingRequest(EmbeddingRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`task` is what is to be made of each text: a vector."""

    task: Literal["embed"] | None = None


class PooledUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """`embedding` are numbers, or float32 numbers, little-endian, in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: str | tuple[float, ...] | msgspec.Raw


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/embeddings, in the order of the input."""

    object: Literal["list"] = "list"
    data: tuple[Embedding, ...]
    model: str
    usage: PooledUsage


class PooledText(msgspec.Struct, frozen=True, kw_only=True):
    """`data` is as `Embedding.embedding`."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: str | tuple[float, ...] | msgspec.Raw


class PoolingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /pooling."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: tuple[PooledText, ...]
    usage: PooledUsage

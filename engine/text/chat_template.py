"""`ChatTemplate`: role/content messages to the prompt text that a chat model was trained on.

Knows where a model keeps its template and in which form that template wants the content of a
message; the running of strangers' Jinja code is in `engine.text.template_sandbox`.  The text
already holds the special tokens, the beginning-of-sequence token included, so it is tokenized
without adding any.  Used by `engine.text.stage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from engine.api.errors import BrokenCheckpoint, InvalidParameter
from engine.text.model_files import read_json_object, read_text_file
from engine.text.template_sandbox import TEMPLATE_RUN_ERRORS, BoundedTemplate
from engine.text.tokenizer import Tokenizer
from store.formats.gguf_parts import read_gguf_metadata

_PROBE = "quire-content-probe"


class ChatTemplate:
    """One model's chat template.

    `bos_token` and `eos_token` are variables of the template.  `tool_use_source` is the
    variant for requests that carry `tools`, where the model has one.
    """

    def __init__(
        self, source: str, *, bos_token: str = "", eos_token: str = "", tool_use_source: str | None = None
    ) -> None:
        """Compile the template.  Raises BrokenCheckpoint where it is not valid Jinja."""
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._template = _compile(source)
        self._tool_use = None if tool_use_source is None else _compile(tool_use_source)
        takes_string = self._shows_probe(_PROBE)
        takes_parts = self._shows_probe([{"type": "text", "text": _PROBE}])
        self._joins_parts = not takes_parts
        self._wraps_strings = takes_parts and not takes_string

    def render(
        self, messages: Sequence[dict[str, Any]], /, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Return the prompt text; `kwargs` are further template variables such as `tools`.

        Content given as a list of text parts is joined with newlines unless the template
        itself understands parts.  Raises InvalidParameter("messages") for content that is not
        text and for everything the template refuses.
        """
        template = self._tool_use if self._tool_use is not None and kwargs.get("tools") else self._template
        prepared = [self._prepare(index, message) for index, message in enumerate(messages)]
        variables = {
            "tools": None,
            "documents": None,
            **kwargs,
            **self._tokens,
            "messages": prepared,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(variables)
        except TEMPLATE_RUN_ERRORS as error:
            raise InvalidParameter(
                "messages",
                f"The model's chat template rejects these messages ({str(error) or type(error).__name__}); check "
                "the roles, their order and the contents.",
            ) from error

    def _prepare(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if content is None:
            return message if message.get("tool_calls") else {**message, "content": ""}
        if isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]} if self._wraps_strings else message
        texts = _texts_of_parts(index, content)
        return {**message, "content": "\n".join(texts)} if self._joins_parts else message

    def _shows_probe(self, content: object) -> bool:
        """Whether the template writes a message's text given as `content`, and not Python's spelling of it."""
        message = {"role": "user", "content": content}
        variables = {"tools": None, "documents": None, **self._tokens, "messages": [message]}
        try:
            text = self._template.render({**variables, "add_generation_prompt": True})
        except TEMPLATE_RUN_ERRORS as error:
            # It is part of a cycle that Jinja makes, and would keep the callers' frames, and with them the source of
            # the vocabulary, until the next full garbage collection.
            error.__traceback__ = None
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text


def load_chat_template(model: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Load the template of a checkpoint directory or GGUF file; None where the model has none.

    A directory's chat_template.jinja goes before tokenizer_config.json.  Raises
    BrokenCheckpoint for a template that is not valid Jinja.
    """
    if not model.is_dir():
        return gguf_chat_template(read_gguf_metadata(model), tokenizer)
    sources = _named_sources(read_json_object(model / "tokenizer_config.json").get("chat_template"))
    file_source = read_text_file(model / "chat_template.jinja")
    if file_source is not None:
        sources = {**sources, "default": file_source}
    return _chat_template(sources, tokenizer)


def gguf_chat_template(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the template in a GGUF file's metadata, None where there is none; errors as `load_chat_template`."""
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    sources = {name: metadata[key] for name, key in keys.items() if isinstance(metadata.get(key), str)}
    return _chat_template(sources, tokenizer)


def _chat_template(sources: dict[str, str], tokenizer: Tokenizer) -> ChatTemplate | None:
    if "default" not in sources:
        return None
    return ChatTemplate(
        sources["default"],
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        tool_use_source=sources.get("tool_use"),
    )


def _named_sources(value: object) -> dict[str, str]:
    """Read `chat_template`: one template, or a list of {"name", "template"} objects."""
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else []
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    return {name: source for name, source in named.items() if isinstance(name, str) and isinstance(source, str)}


def _texts_of_parts(index: int, content: object) -> list[str]:
    parts = content if isinstance(content, list | tuple) else [content]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidParameter(
                "messages", f"Message {index} holds content of type {kind!r}, but the model reads text only; remove it."
            )
        texts.append(text)
    return texts


def _compile(source: str) -> BoundedTemplate:
    try:
        return BoundedTemplate(source)
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        raise BrokenCheckpoint(
            f"The model's chat template is not valid Jinja ({error}); pull the model again or correct the template."
        ) from error

'''Modelfiles: the text that `quire create` reads and `quire show --modelfile` prints.

    # a comment, on a line of its own
    FROM qwen3:0.6b
    PARAMETER temperature 0.2
    PARAMETER stop "User:"
    SYSTEM """You answer
    in rhymes."""
    MESSAGE user Hello
    MESSAGE assistant Hello, fellow!

Instructions are case-insensitive.  A value goes to the end of its line, may stand in double quotes, which
come off, or between triple quotes, where it may have several lines; nothing is escaped.  Knows what the
instructions mean but opens no model; called by `app.creation`.
'''

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from store.errors import InvalidModelfile
from store.presets.preset import Parameters, Preset, PresetMessage, Role

MAX_MODELFILE_BYTES = 1024 * 1024
_QUOTES = '"""'
_ROLES: tuple[Role, ...] = ("system", "user", "assistant")
_INSTRUCTIONS = ("FROM", "PARAMETER", "SYSTEM", "TEMPLATE", "MESSAGE", "LICENSE")
_WITH_WORD = {"PARAMETER": "a name and a value", "MESSAGE": "a role and a text"}

# An instruction's name, or nothing on a line that is empty or a comment.
_LINE_START = re.compile(r"[ \t]*(?:#[^\n]*\n?|\n|\Z|(?P<name>[^ \t\n]+))")
_WORD = re.compile(r"[ \t]+([^ \t\n]+)")
_REST = re.compile(r"[ \t]*([^\n]*)\n?")
_CLOSING = re.compile(r'"{3,5}')
_GO_TEMPLATE = re.compile(r"\{\{-?\s*(?:[.$]|/\*|(?:if|else|end|with|define|block|range\s+[.$])\b)")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


_PARAMETERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "temperature": ("temperature", _finite),
    "top_k": ("top_k", int),
    "top_p": ("top_p", _finite),
    "min_p": ("min_p", _finite),
    "repeat_penalty": ("repetition_penalty", _finite),
    "presence_penalty": ("presence_penalty", _finite),
    "frequency_penalty": ("frequency_penalty", _finite),
    "seed": ("seed", int),
    "stop": ("stop", str),
    "num_ctx": ("context_length", int),
    "num_predict": ("max_tokens", int),
}
"""Names in a Modelfile: the engine's name, and how its value is read."""

_NO_LIMIT = ("-1", "-2")
"""Of num_predict: up to the end of the context, which is what a preset without it does."""


@dataclass(frozen=True, slots=True)
class Modelfile:
    """`base` is what FROM names, as it is written."""

    base: str
    preset: Preset


def parse_modelfile(text: str) -> Modelfile:
    """Read a Modelfile.  Raises InvalidModelfile, which names the line."""
    reader = _Reader()
    unix_text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    for instruction in _Scanner(unix_text).instructions():
        reader.take(instruction)
    return reader.result()


def format_modelfile(modelfile: Modelfile) -> str:
    """The text that parses to `modelfile`.  Raises InvalidModelfile for a text that no quoting can express."""
    preset = modelfile.preset
    lines = [f"FROM {_quoted('FROM', modelfile.base)}"]
    given = preset.parameters.given()
    for name, (engine_name, _) in _PARAMETERS.items():
        if engine_name in given:
            values = given[engine_name] if name == "stop" else [str(given[engine_name])]
            lines += [f"PARAMETER {name} {_quoted('PARAMETER', value)}" for value in values]
    for name, value in (("SYSTEM", preset.system), ("TEMPLATE", preset.template), ("LICENSE", preset.license)):
        if value is not None:
            lines.append(f"{name} {_quoted(name, value)}")
    lines += [f"MESSAGE {message.role} {_quoted('MESSAGE', message.content)}" for message in preset.messages]
    return "\n".join(lines) + "\n"


def parameter_name(engine_name: str) -> str:
    """What a Modelfile calls a parameter of the engine."""
    return next((name for name, (known, _) in _PARAMETERS.items() if known == engine_name), engine_name)


def _quoted(what: str, text: str) -> str:
    """`text` as a value that `_Scanner` reads back; triple quotes in it leave only the simple ones around it."""
    if _QUOTES not in text:
        is_plain = text and text == text.strip(" \t") and "\n" not in text and not text.startswith('"')
        return text if is_plain else f"{_QUOTES}{text}{_QUOTES}"
    if "\n" not in text and not text.startswith('""'):
        return f'"{text}"'
    raise InvalidModelfile(
        f"The text of {what} has both triple quotes and several lines, which a Modelfile cannot hold; "
        "use `quire cp` for another name, or `quire export` for another machine."
    )


@dataclass(frozen=True, slots=True)
class _Instruction:
    """`word` is a parameter's name or a message's role, empty for instructions without one."""

    line: int
    name: str
    word: str
    value: str


class _Scanner:
    """Splits the text into instructions, one pass from its beginning to its end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._line = 1

    def instructions(self) -> Iterator[_Instruction]:
        while self._position < len(self._text):
            start = _LINE_START.match(self._text, self._position)
            assert start is not None, "the pattern matches every line"
            self._advance(start.end())
            if start["name"]:
                line, name = self._line, start["name"].upper()
                word = self._word(name) if name in _WITH_WORD else ""
                yield _Instruction(line, name, word, self._value(name))

    def _word(self, name: str) -> str:
        match = _WORD.match(self._text, self._position)
        if match is None:
            raise _error(self._line, f"{name} needs {_WITH_WORD[name]}; write it behind {name}")
        self._advance(match.end())
        return match[1]

    def _value(self, name: str) -> str:
        match = _REST.match(self._text, self._position)
        assert match is not None, "the pattern matches every rest of a line"
        if match[1].startswith(_QUOTES):
            return self._quoted_lines(name, match.start(1) + len(_QUOTES))
        value = match[1].rstrip(" \t")
        line = self._line
        self._advance(match.end())
        if not value:
            raise _error(line, f"{name} needs a value; write it on the same line, or between triple quotes")
        if not value.startswith('"'):
            return value
        if len(value) < 2 or not value.endswith('"'):
            raise _error(line, f"the quote behind {name} is not closed; end the line with it, or use triple quotes")
        return value[1:-1]

    def _quoted_lines(self, name: str, start: int) -> str:
        """A value between triple quotes; it may itself end with one or two."""
        closing = _CLOSING.search(self._text, start)
        if closing is None:
            raise _error(self._line, f"the triple quotes behind {name} are never closed; end the text with them")
        end = closing.end() - len(_QUOTES)
        rest = _REST.match(self._text, end + len(_QUOTES))
        assert rest is not None, "the pattern matches every rest of a line"
        self._advance(end)
        if rest[1].strip(" \t"):
            raise _error(self._line, f"there is text behind the triple quotes of {name}; move it to a line of its own")
        self._advance(rest.end())
        return self._text[start:end]

    def _advance(self, position: int) -> None:
        self._line += self._text.count("\n", self._position, position)
        self._position = position


@dataclass(slots=True)
class _Reader:
    """Gathers what the instructions say; each may be given once but for MESSAGE, LICENSE and stop."""

    texts: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[PresetMessage] = field(default_factory=list)
    licenses: list[str] = field(default_factory=list)

    def take(self, instruction: _Instruction) -> None:
        match instruction.name:
            case "PARAMETER":
                self._take_parameter(instruction)
            case "MESSAGE":
                self.messages.append(PresetMessage(_role(instruction), instruction.value))
            case "LICENSE":
                self.licenses.append(instruction.value)
            case "FROM" | "SYSTEM" | "TEMPLATE":
                self._once(instruction.name, instruction.line)
                if instruction.name == "TEMPLATE":
                    _refuse_go_template(instruction)
                self.texts[instruction.name] = instruction.value
            case "ADAPTER":
                raise _error(instruction.line, "adapters are not supported yet; name a model that has it merged in")
            case name:
                raise _error(instruction.line, f"{name} is no instruction; use one of {', '.join(_INSTRUCTIONS)}")

    def _take_parameter(self, instruction: _Instruction) -> None:
        name, value = instruction.word.lower(), instruction.value
        if name not in _PARAMETERS:
            known = ", ".join(_PARAMETERS)
            raise _error(instruction.line, f"the parameter {name} is not supported; remove it, or use one of {known}")
        engine_name, read = _PARAMETERS[name]
        if name == "stop":
            if not value:
                raise _error(instruction.line, "a stop string must not be empty; remove the line")
            self.parameters[name] = (*self.parameters.get(name, ()), value)
            return
        self._once(f"the parameter {name}", instruction.line)
        if name == "num_predict" and value in _NO_LIMIT:
            return
        try:
            self.parameters[engine_name] = read(value)
        except (ValueError, OverflowError):
            kind = "a whole number" if read is int else "a number"
            raise _error(instruction.line, f"the parameter {name} needs {kind}, not {ascii(value)[:40]}") from None

    def _once(self, what: str, line: int) -> None:
        if what in self.lines:
            raise _error(line, f"{what} is given twice, first on line {self.lines[what]}; keep one of them")
        self.lines[what] = line

    def result(self) -> Modelfile:
        if not self.texts.get("FROM"):
            raise InvalidModelfile("The Modelfile names no model; begin it with a line such as `FROM qwen3:0.6b`.")
        preset = Preset(
            parameters=Parameters(**self.parameters),
            system=self.texts.get("SYSTEM"),
            template=self.texts.get("TEMPLATE"),
            messages=tuple(self.messages),
            license="\n\n".join(self.licenses) if self.licenses else None,
        )
        return Modelfile(self.texts["FROM"], preset)


def _role(instruction: _Instruction) -> Role:
    for role in _ROLES:
        if instruction.word.lower() == role:
            return role
    shown = ascii(instruction.word)[:40]
    raise _error(instruction.line, f"{shown} is no role of a message; use one of {', '.join(_ROLES)}")


def _refuse_go_template(instruction: _Instruction) -> None:
    if not instruction.value:
        raise _error(instruction.line, "TEMPLATE is empty; leave it out, and the model's own is used")
    if _GO_TEMPLATE.search(instruction.value):
        raise _error(
            instruction.line,
            "this TEMPLATE is written for Ollama, in Go's template language, and only Jinja is understood here; "
            "leave TEMPLATE out, and the model's own is used",
        )


def _error(line: int, what: str) -> InvalidModelfile:
    return InvalidModelfile(f"Line {line} of the Modelfile: {what}.")

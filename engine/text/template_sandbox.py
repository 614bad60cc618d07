"""Compile and run chat templates, which are programs from strangers, with bounded work.

The Jinja sandbox keeps a template away from Python's internals but lets it loop and build
text without limit, so every loop, call, filter and concatenation is metered.  Extensions, filters
and globals are the ones that Hugging Face templates rely on (transformers,
utils/chat_template_utils.py).  Knows nothing of messages; used by `engine.text.chat_template`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
MAX_CPU_S = 10.0
MAX_TEXT_CHARS = 1 << 25
_CHARS_PER_STEP = 4096
_ITEMS_PER_STEP = 32
_STEPS_PER_LOOK_AT_THE_CLOCK = 64
_MAX_EXPONENT = 64
_MAX_INT_BITS = 1024
# Not an identifier, so that no template can name it.
_METER = "work meter"

# What a template can raise while it runs on values that it does not expect.
TEMPLATE_RUN_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateLimitExceeded(jinja2.TemplateError):
    """The template did more work, or wrote more text, than any honest chat needs."""


class BoundedTemplate:
    """A compiled template; rendering ends after MAX_STEPS steps, MAX_CPU_S seconds or MAX_TEXT_CHARS characters."""

    def __init__(self, source: str) -> None:
        """Compile `source`.  Raises jinja2.TemplateSyntaxError."""
        environment = _Environment()
        tree = _MeterInserter().visit(environment.parse(source))
        code = environment.compile(tree)
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(self, variables: dict[str, Any]) -> str:
        """Return the text.  Raises one of TEMPLATE_RUN_ERRORS."""
        meter = _WorkMeter()
        pieces = []
        num_chars = 0
        for piece in self._template.generate({**variables, _METER: meter}):
            num_chars += len(piece)
            if num_chars > MAX_TEXT_CHARS:
                raise TemplateLimitExceeded("the rendered text is too long")
            pieces.append(piece)
        return "".join(pieces)


class _WorkMeter:
    """Counts the steps of one rendering; the clock catches templates whose single steps are expensive."""

    def __init__(self) -> None:
        self._num_steps_left = MAX_STEPS
        self._num_spent = 0
        # CPU time of this thread: a busy machine must not make an honest template fail.
        self._deadline_s = time.thread_time() + MAX_CPU_S

    def spend(self, num_steps: int = 1) -> None:
        self._num_steps_left -= num_steps
        self._num_spent += 1
        late = self._num_spent % _STEPS_PER_LOOK_AT_THE_CLOCK == 0 and time.thread_time() > self._deadline_s
        if late or self._num_steps_left < 0:
            raise TemplateLimitExceeded("it does not come to an end")

    def weigh(self, value: Any, length: int) -> None:
        """Pay for a value of this kind (text or container) and length, before or after it is made."""
        if length > MAX_TEXT_CHARS:
            raise TemplateLimitExceeded("it builds a text that is too long")
        self.spend(1 + length // (_CHARS_PER_STEP if isinstance(value, str) else _ITEMS_PER_STEP))


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _to_json
        self.filters["metered"] = _metered
        self.filters["metered_items"] = _metered_items
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        # Their cost grows with a number in the template instead of with the data.
        del self.globals["lipsum"], self.filters["center"], self.filters["slice"], self.filters["batch"]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter_of(context)
        if operator == "+":
            meter.weigh(left, _length(left) + _length(right))
        elif isinstance(left, int) and isinstance(right, int):
            if left.bit_length() > _MAX_INT_BITS or (operator == "**" and right > _MAX_EXPONENT):
                raise TemplateLimitExceeded("it computes too large a number")
        elif operator == "*":
            count, repeated = (left, right) if isinstance(left, int) else (right, left)
            meter.weigh(repeated, _length(repeated) * max(count, 0) if isinstance(count, int) else 0)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in Jinja
        _meter_of(__context).spend()
        if any(isinstance(value, int) and value > MAX_TEXT_CHARS for value in (*args, *kwargs.values())):
            raise TemplateLimitExceeded("it calls a function with too large a number")
        return super().call(__context, __obj, *args, **kwargs)


class _MeterInserter(NodeTransformer):
    """Puts a metering filter around every loop's items and every expression that can multiply text."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - named after the node
        self.generic_visit(node)
        items = node.iter
        assert isinstance(items, nodes.Expr)
        node.iter = _filtered(items, "metered_items")
        return node

    def visit_Concat(self, node: nodes.Expr) -> nodes.Expr:  # noqa: N802 - named after the node
        self.generic_visit(node)
        return _filtered(node, "metered")

    visit_Call = visit_Concat  # noqa: N815 - named after the node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Expr:  # noqa: N802 - named after the node
        self.generic_visit(node)
        # The filter of a {% filter %} block has no value of its own to take the result from.
        return node if node.node is None else _filtered(node, "metered")


class _GenerationTag(Extension):
    """{% generation %} marks what a model wrote, for training; serving shows its body unchanged."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _meter_of(context: Context) -> _WorkMeter:
    meter = context.parent[_METER]
    assert isinstance(meter, _WorkMeter)
    return meter


@jinja2.pass_context
def _metered(context: Context, value: Any) -> Any:
    _meter_of(context).weigh(value, _length(value))
    return value


@jinja2.pass_context
def _metered_items(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    meter = _meter_of(context)
    for item in items:
        meter.spend()
        yield item


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict | range) else 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

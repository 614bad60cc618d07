"""Chat templates: conventions of Hugging Face, forms of content, and bounds on hostile ones."""

from __future__ import annotations

import gc
import json
import weakref
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from engine.api.errors import BrokenCheckpoint, InvalidParameter
from engine.text.chat_template import ChatTemplate, gguf_chat_template, load_chat_template
from engine.text.tokenizer import Tokenizer, gguf_tokenizer
from tests.fakes.tiny_tokenizers import CHATML, byte_level_backend, byte_level_metadata, write_directory, write_gguf

HELLO = [{"role": "user", "content": "hello"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
LOOPS_OVER_PARTS = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
TAKES_BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)


def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend(), bos_token_id=0, eos_token_id=2)


def test_a_failed_probe_keeps_nothing_of_its_callers() -> None:
    def load() -> weakref.ref[set[str]]:
        vocabulary = {"what the caller has read"}
        ChatTemplate("{{ 'text: ' + messages[0].content }}")
        return weakref.ref(vocabulary)

    gc.disable()
    try:
        assert load()() is None
    finally:
        gc.enable()


def test_chatml() -> None:
    template = ChatTemplate(CHATML)
    messages = [{"role": "system", "content": "Be <brief> & kind."}, *HELLO]
    prompt = "<|im_start|>system\nBe <brief> & kind.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    assert template.render(messages, add_generation_prompt=False) == prompt
    assert template.render(messages) == prompt + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ {'b': '<é>', 'a': 1}|tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1]|tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(4) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "013"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "ahellob"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% for x in [1, 2, 3] if x != 2 %}{{ loop.index }}{{ x }}{{ loop.last }}{% endfor %}", "11False23True"),
        ("{% for x in [1, 2] %}{{ loop.length }}{{ loop.revindex }}{% endfor %}", "2221"),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{% macro twice(x) %}{{ x ~ x }}{% endmacro %}{{ twice('ab') }}", "abab"),
        ("{% filter upper %}ab{% endfilter %}", "AB"),
        ("{{ 'ab' * 2 + 'c' }}{{ 2 * 3 }}{{ 2 ** 3 }}{{ [1] * 2 }}", "ababc68[1, 1]"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{{ absent }}{{ absent is defined }}", "False"),
    ],
)
def test_conventions_of_hugging_face_templates(source: str, expected: str) -> None:
    assert ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(HELLO) == expected


def test_strftime_now_gives_the_current_date() -> None:
    year = ChatTemplate("{{ strftime_now('%Y') }}").render(HELLO)
    assert int(year) in range(datetime.now().year - 1, datetime.now().year + 1)


def test_keyword_arguments_are_variables_but_cannot_replace_the_messages() -> None:
    template = ChatTemplate("{{ thinking }} {{ messages[0].content }} {{ bos_token }}", bos_token="<s>")
    prompt = template.render(HELLO, thinking=True, messages=[], self=1, bos_token="x")
    assert prompt == "True hello <s>"


def test_text_parts_are_joined_for_a_template_that_expects_strings() -> None:
    assert "user\none\ntwo<" in ChatTemplate(CHATML).render(PARTS)
    assert ChatTemplate("{{ messages[0].content }}").render(PARTS) == "one\ntwo"


def test_text_parts_are_kept_for_a_template_that_reads_them() -> None:
    assert ChatTemplate(TAKES_BOTH).render(PARTS) == "<one><two>"
    assert ChatTemplate(TAKES_BOTH).render(HELLO) == "hello"


def test_strings_become_parts_for_a_template_that_reads_only_parts() -> None:
    assert ChatTemplate(LOOPS_OVER_PARTS).render([*HELLO, *PARTS]) == "helloonetwo"


def test_an_absent_content_is_empty_unless_tools_are_called() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert template.render([{"role": "user", "content": None}, {"role": "user"}, call]) == "[][][None]"


@pytest.mark.parametrize(
    ("content", "kind"),
    [([{"type": "image_url", "image_url": {"url": "x"}}], "image_url"), (["a"], "str"), (5, "int"), ([{}], "None")],
)
def test_content_that_is_not_text_is_refused(content: Any, kind: str) -> None:
    with pytest.raises(InvalidParameter, match=kind) as caught:
        ChatTemplate(CHATML).render([{"role": "user", "content": content}])
    assert caught.value.param == "messages"


def test_the_messages_themselves_are_not_changed() -> None:
    messages = [dict(PARTS[0])]
    ChatTemplate(CHATML).render(messages)
    assert messages == PARTS


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[7].content.x }}", "undefined|no attribute|no element"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ range(1000000) }}", "Range too big"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for x in 5 %}{% endfor %}", "iterable"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_what_a_template_raises_names_the_messages(source: str, reason: str) -> None:
    template = ChatTemplate("{% if messages[0].content == 'hello' %}" + source + "{% endif %}")
    with pytest.raises(InvalidParameter, match=f"rejects these messages.*({reason})") as caught:
        template.render(HELLO)
    assert caught.value.param == "messages"


ENDLESS = "does not come to an end"
TOO_LONG = "text (that )?is too long"
DOUBLE = "{%% set n = namespace(s='ab') %%}{%% for i in range(60) %%}{%% set n.s = %s %%}{%% endfor %%}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", ENDLESS),
        ("{% for i in range(99999) %}{{ range(99999)|list|length }}{% endfor %}", ENDLESS),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}", ENDLESS),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        (DOUBLE % "n.s ~ n.s", TOO_LONG),
        (DOUBLE % "n.s + n.s", TOO_LONG),
        (DOUBLE % "n.s * 2", TOO_LONG),
        (DOUBLE % "n.s|replace('a', 'aa')", TOO_LONG),
        (DOUBLE % "n.s.replace('a', 'aa')", TOO_LONG),
        ("{{ 'a' * 10 ** 12 }}", TOO_LONG),
        ("{{ 10 * [0] * 10 ** 12 }}", TOO_LONG),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", TOO_LONG),
        ("{% set n = namespace(s=9) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}", "large a number"),
        ("{{ 9 ** (9 ** 9) }}", "large a number"),
        ("{{ 'a'.ljust(10 ** 12) }}", "large a number"),
    ],
)
def test_a_template_without_end_is_stopped(source: str, reason: str) -> None:
    template = ChatTemplate("{% if messages[0].content == 'hello' %}" + source + "{% endif %}")
    with pytest.raises(InvalidParameter, match=f"rejects these messages.*{reason}"):
        template.render(HELLO)


def test_expensive_steps_are_stopped_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% for i in range(1000) %}{% endfor %}")
    assert template.render(HELLO) == ""
    monkeypatch.setattr("engine.text.template_sandbox.MAX_CPU_S", -1.0)
    with pytest.raises(InvalidParameter, match="does not come to an end"):
        template.render(HELLO)


def test_an_honest_long_chat_is_not_stopped() -> None:
    messages = [{"role": "user", "content": "word " * 2000}] * 500
    assert len(ChatTemplate(CHATML).render(messages)) > 5_000_000


@pytest.mark.parametrize("source", ["{% if %}", "{{ x|no_such_filter }}", "{% unknown %}"])
def test_a_template_that_does_not_compile_is_a_broken_checkpoint(source: str) -> None:
    with pytest.raises(BrokenCheckpoint, match="not valid Jinja"):
        ChatTemplate(source)


def test_a_directory_gives_its_template_and_special_tokens(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level_backend(), tokenizer_config={"chat_template": "{{ bos_token + eos_token }}"})
    template = load_chat_template(tmp_path, tokenizer())
    assert template is not None
    assert template.render(HELLO) == "<|endoftext|><|im_end|>"


def test_named_templates_the_one_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools|length }} tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    template = load_chat_template(tmp_path, tokenizer())
    assert template is not None
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{}]) == "1 tools"


def test_a_template_file_goes_before_the_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}), encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text("newé", encoding="utf-8")
    template = load_chat_template(tmp_path, tokenizer())
    assert template is not None
    assert template.render(HELLO) == "newé"


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, tokenizer()) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "rag"}, 5]}', encoding="utf-8")
    assert load_chat_template(tmp_path, tokenizer()) is None
    assert gguf_chat_template(byte_level_metadata(), tokenizer()) is None


def test_a_template_that_is_not_utf8_is_broken(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BrokenCheckpoint, match=r"chat_template\.jinja"):
        load_chat_template(tmp_path, tokenizer())


def test_a_gguf_file_gives_its_template(tmp_path: Path) -> None:
    metadata = {**byte_level_metadata(), "tokenizer.chat_template": "{{ bos_token }}" + CHATML}
    path = write_gguf(tmp_path / "tiny.gguf", metadata)
    template = load_chat_template(path, gguf_tokenizer(metadata))
    assert template is not None
    assert template.render(HELLO).startswith("<|endoftext|><|im_start|>user\nhello<|im_end|>")

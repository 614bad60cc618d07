"""Modelfiles: what they may say, what is refused and where, and that printing one loses nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import InvalidModelfile
from store.presets.modelfile import Modelfile, format_modelfile, parse_modelfile
from store.presets.preset import Parameters, Preset, PresetMessage

EVERYTHING = '''# A test
FROM ./some folder/model.gguf
parameter temperature 0.2
PARAMETER top_k\t40
PARAMETER repeat_penalty 1.1
PARAMETER num_ctx 4096
PARAMETER num_predict -1
PARAMETER stop "User: "
PARAMETER stop """
Human:"""
  # An indented comment
SYSTEM """You are "Mario",
# and this is no comment.
"""
MESSAGE user Is Toronto in Canada? "yes" or "no"
MESSAGE assistant yes
LICENSE MIT
LICENSE "with additions"
'''


def test_everything_is_read() -> None:
    modelfile = parse_modelfile("\ufeff" + EVERYTHING.replace("\n", "\r\n"))
    assert modelfile.base == "./some folder/model.gguf"
    assert modelfile.preset == Preset(
        parameters=Parameters(
            temperature=0.2, top_k=40, repetition_penalty=1.1, context_length=4096, stop=("User: ", "\nHuman:")
        ),
        system='You are "Mario",\n# and this is no comment.\n',
        messages=(
            PresetMessage("user", 'Is Toronto in Canada? "yes" or "no"'),
            PresetMessage("assistant", "yes"),
        ),
        license="MIT\n\nwith additions",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no model"),
        ("SYSTEM hello", "names no model"),
        ("FROM a\n\nFORM b", r"Line 3 .* FORM is no instruction"),
        ("FROM a\nFROM b", r"Line 2 .* FROM is given twice, first on line 1"),
        ("FROM", r"Line 1 .* FROM needs a value"),
        ("FROM a\nPARAMETER", r"Line 2 .* a name and a value"),
        ("FROM a\nPARAMETER temperature", r"Line 2 .* PARAMETER needs a value"),
        ("FROM a\nPARAMETER temperature warm", r"Line 2 .* temperature needs a number, not 'warm'"),
        ("FROM a\nPARAMETER temperature nan", r"Line 2 .* temperature needs a number"),
        ("FROM a\nPARAMETER seed 1.5", r"Line 2 .* seed needs a whole number"),
        ("FROM a\nPARAMETER num_gpu 1", r"Line 2 .* parameter num_gpu is not supported; .* temperature"),
        ("FROM a\nPARAMETER top_k 1\nPARAMETER top_k 2", r"Line 3 .* top_k is given twice, first on line 2"),
        ('FROM a\nPARAMETER stop ""', r"Line 2 .* must not be empty"),
        ("FROM a\nMESSAGE wizard hello", r"Line 2 .* 'wizard' is no role"),
        ("FROM a\nMESSAGE user", r"Line 2 .* MESSAGE needs a value"),
        ('FROM a\nSYSTEM "open', r"Line 2 .* not closed"),
        ('FROM a\nSYSTEM """open\nstill', r"Line 2 .* never closed"),
        ('FROM a\nSYSTEM """one\ntwo""" three', r"Line 3 .* text behind the triple quotes"),
        ('FROM a\nSYSTEM """one\ntwo"""\nNONSENSE', r"Line 4 .* NONSENSE"),
        ("FROM a\nADAPTER ./lora", r"Line 2 .* adapters are not supported yet"),
        ("FROM a\nTEMPLATE {{ .System }} {{ .Prompt }}", r"Line 2 .* only Jinja .* leave TEMPLATE out"),
        ('FROM a\nTEMPLATE """{{- if .System }}x{{ end }}"""', r"Line 2 .* leave TEMPLATE out"),
        ("FROM a\nTEMPLATE {{ range .Messages }}{{ end }}", r"Line 2 .* leave TEMPLATE out"),
        ('FROM a\nTEMPLATE ""', r"Line 2 .* TEMPLATE is empty"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InvalidModelfile, match=message):
        parse_modelfile(text)


def test_a_jinja_template_passes() -> None:
    template = "{% for m in messages %}{{ m['content'] }}{{ '\\n' if not loop.last else '' }}{% endfor %}{{ range(2) }}"
    assert parse_modelfile(f"FROM a\nTEMPLATE {template}").preset.template == template


CHARACTERS = st.one_of(st.sampled_from(list('"" \t\n#\\{a')), st.characters(codec="utf-8", exclude_characters="\r"))
TEXTS = st.text(alphabet=CHARACTERS, max_size=30)
# Numbers as a Modelfile may hold them; whether they are in range is the engine's to say.
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
INTEGERS = st.integers(-(2**63), 2**63 - 1)


def is_expressible(text: str) -> bool:
    return '"""' not in text or ("\n" not in text and not text.startswith('""'))


EXPRESSIBLE = TEXTS.filter(is_expressible)
MESSAGES = st.builds(PresetMessage, st.sampled_from(["system", "user", "assistant"]), EXPRESSIBLE)
PRESETS = st.builds(
    Preset,
    parameters=st.builds(
        Parameters,
        temperature=st.none() | NUMBERS,
        top_p=st.none() | NUMBERS,
        repetition_penalty=st.none() | NUMBERS,
        top_k=st.none() | INTEGERS,
        seed=st.none() | INTEGERS,
        max_tokens=st.none() | st.integers(1, 2**31),
        context_length=st.none() | INTEGERS,
        stop=st.lists(EXPRESSIBLE.filter(bool), max_size=3).map(tuple),
    ),
    system=st.none() | EXPRESSIBLE,
    template=st.none() | st.just("{{ messages }}"),
    messages=st.lists(st.builds(PresetMessage, st.sampled_from(["system", "user", "assistant"]), EXPRESSIBLE)).map(
        tuple
    ),
    license=st.none() | EXPRESSIBLE,
)


@given(base=EXPRESSIBLE.filter(bool), preset=PRESETS)
def test_a_printed_modelfile_parses_to_itself(base: str, preset: Preset) -> None:
    modelfile = Modelfile(base, preset)
    assert parse_modelfile(format_modelfile(modelfile)) == modelfile


@pytest.mark.parametrize("text", ['"""\n', 'a"""b\n', '""x"""'])
def test_a_text_that_no_quoting_can_hold_is_refused_not_mangled(text: str) -> None:
    with pytest.raises(InvalidModelfile, match="quire cp"):
        format_modelfile(Modelfile("a", Preset(system=text)))


KEYWORDS = ["FROM", "SYSTEM", "PARAMETER", "MESSAGE", "TEMPLATE", "stop", "user", "temperature", '"""', '"', "\n", " "]


@given(text=st.lists(st.one_of(st.sampled_from(KEYWORDS), st.text(max_size=5)), max_size=30).map("".join))
def test_any_text_is_read_or_refused_by_one_error(text: str) -> None:
    try:
        modelfile = parse_modelfile(text)
    except InvalidModelfile:
        return
    assert parse_modelfile(format_modelfile(modelfile)) == modelfile


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_what_goes_before_a_conversation() -> None:
    preset = Preset(system="Rhyme.", messages=(PresetMessage("user", "1"), PresetMessage("assistant", "2")))
    asked = (message("user", "3"),)
    before = (message("user", "1"), message("assistant", "2"))
    assert preset.opening(asked) == (message("system", "Rhyme."), *before, *asked)
    own = (message("system", "Do not."), *asked)
    assert preset.opening(own) == (message("system", "Do not."), *before, *asked)
    assert Preset(system="").opening(asked) == asked
    example = Preset(messages=(PresetMessage("system", "Rhyme."),))
    assert example.opening(asked) == (message("system", "Rhyme."), *asked)
    assert example.opening(own) == own


def test_a_preset_fills_its_gaps_from_the_one_below() -> None:
    below = Preset(parameters=Parameters(temperature=0.5, stop=("a",)), system="below", license="MIT")
    above = Preset(parameters=Parameters(temperature=0.0, stop=("b",)), messages=(PresetMessage("user", "1"),))
    assert above.over(below) == Preset(
        parameters=Parameters(temperature=0.0, stop=("b",)),
        system="below",
        license="MIT",
        messages=(PresetMessage("user", "1"),),
    )
    assert above.over(None) is above

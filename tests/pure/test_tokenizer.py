"""Tokenizers from Hugging Face directories, checked against the `tokenizers` library itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, processors

from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.fakes.tiny_tokenizers import byte_level_backend, sentencepiece_backend, write_directory

BYTE_LEVEL = byte_level_backend()
SENTENCEPIECE = sentencepiece_backend()
NAMED_BYTE_LEVEL = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}}


@given(st.text())
def test_byte_level_text_comes_back(text: str) -> None:
    tokenizer = Tokenizer(BYTE_LEVEL)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(st.text(st.characters(codec="utf-8", exclude_characters="\u2581")))
def test_sentencepiece_text_comes_back(text: str) -> None:
    tokenizer = Tokenizer(SENTENCEPIECE)
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<s>", "").replace("</s>", "").replace("<unk>", "")


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5)), st.booleans())
def test_byte_level_decode_equals_the_library(token_ids: list[int], skip: bool) -> None:
    expected = BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)
    assert Tokenizer(BYTE_LEVEL).decode(token_ids, skip_special_tokens=skip) == expected


@given(st.lists(st.integers(0, SENTENCEPIECE.get_vocab_size() - 1)), st.booleans())
def test_sentencepiece_decode_equals_the_library_for_whole_characters(token_ids: list[int], skip: bool) -> None:
    expected = SENTENCEPIECE.decode(token_ids, skip_special_tokens=skip)
    decoded = Tokenizer(SENTENCEPIECE).decode(token_ids, skip_special_tokens=skip)
    assert ("\ufffd" in decoded) == ("\ufffd" in expected)
    if "\ufffd" not in expected:
        assert decoded == expected


def test_a_bad_byte_does_not_spoil_the_good_characters_of_its_run() -> None:
    tokenizer = Tokenizer(SENTENCEPIECE)
    token_ids = [3 + byte for byte in (*"€".encode(), 0xFF)]
    assert tokenizer.decode(token_ids) == "€\ufffd"


def test_special_tokens_are_single_ids_and_can_be_hidden() -> None:
    tokenizer = Tokenizer(BYTE_LEVEL)
    token_ids = tokenizer.encode("<|im_start|>hello<tool><|im_end|>")
    assert [tokenizer.token_text(token_id) for token_id in token_ids] == [
        "<|im_start|>",
        "hello",
        "<tool>",
        "<|im_end|>",
    ]
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.decode(token_ids) == "hello<tool>"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<|im_start|>hello<tool><|im_end|>"


def test_the_text_of_a_token_shows_bytes_that_are_no_character() -> None:
    tokenizer = Tokenizer(BYTE_LEVEL)
    first, second = tokenizer.encode("🙂")
    assert tokenizer.token_text(first) == "\\xf0\\x9f"
    assert tokenizer.token_bytes(first) + tokenizer.token_bytes(second) == "🙂".encode()


@pytest.mark.parametrize(
    ("generation_config", "tokenizer_config", "config", "expected"),
    [
        ({"eos_token_id": [2, 0]}, NAMED_BYTE_LEVEL, {"eos_token_id": 1}, (2, 0)),
        ({"eos_token_id": 0}, NAMED_BYTE_LEVEL, {}, (0,)),
        ({}, NAMED_BYTE_LEVEL, {"eos_token_id": [0, 2]}, (2, 0)),
        ({}, {}, {"eos_token_id": 1}, (1,)),
        ({}, {}, {}, ()),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(
    tmp_path: Path,
    generation_config: dict[str, Any],
    tokenizer_config: dict[str, Any],
    config: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    files = {"generation_config": generation_config, "tokenizer_config": tokenizer_config, "config": config}
    tokenizer = load_tokenizer(write_directory(tmp_path, BYTE_LEVEL, **files))
    assert tokenizer.eos_token_ids == expected


def test_bos_and_eos_spellings_come_from_the_tokenizer_config(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_directory(tmp_path, BYTE_LEVEL, tokenizer_config=NAMED_BYTE_LEVEL))
    assert (tokenizer.bos_token_id, tokenizer.bos_token, tokenizer.eos_token) == (0, "<|endoftext|>", "<|im_end|>")


def test_the_tokenizer_file_alone_says_what_is_put_around_a_text(tmp_path: Path) -> None:
    backend = byte_level_backend()
    config = {**NAMED_BYTE_LEVEL, "add_bos_token": True}
    assert load_tokenizer(write_directory(tmp_path, backend, tokenizer_config=config)).encode("a") == [100]
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    config = {**NAMED_BYTE_LEVEL, "add_bos_token": False}
    tokenizer = load_tokenizer(write_directory(tmp_path, backend, tokenizer_config=config))
    assert tokenizer.encode("a") == [0, 100]
    assert tokenizer.encode("a", add_special_tokens=False) == [100]


def test_a_plain_word_named_as_eos_becomes_special(tmp_path: Path) -> None:
    hello = BYTE_LEVEL.token_to_id("hello")
    tokenizer = load_tokenizer(write_directory(tmp_path, BYTE_LEVEL, tokenizer_config={"eos_token": "hello"}))
    assert tokenizer.special_token_ids == {0, 1, 2, hello}
    assert tokenizer.eos_token_ids == (hello,)


def test_added_tokens_of_the_tokenizer_config_become_special(tmp_path: Path) -> None:
    tool = BYTE_LEVEL.token_to_id("<tool>")
    entries = {str(tool): {"content": "<tool>", "special": True, "unheard_of": 1}}
    tokenizer = load_tokenizer(
        write_directory(tmp_path, BYTE_LEVEL, tokenizer_config={"added_tokens_decoder": entries})
    )
    assert tool in tokenizer.special_token_ids
    assert tokenizer.decode(tokenizer.encode("hello<tool>")) == "hello"


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=9)
    tokenizer = load_tokenizer(write_directory(tmp_path, backend))
    assert len(tokenizer.encode("a b c")) == 5


def test_a_directory_without_tokenizer_json_names_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"has no tokenizer\.json; add one with transformers"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\x80\x81"])
def test_a_broken_json_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    write_directory(tmp_path, BYTE_LEVEL)
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(BrokenCheckpoint, match=name):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("entries", [[], {"x": {"content": "a"}}, {"3": {}}, {"3": "a"}])
def test_malformed_added_tokens_are_refused(tmp_path: Path, entries: Any) -> None:
    write_directory(tmp_path, BYTE_LEVEL, tokenizer_config={"added_tokens_decoder": entries})
    with pytest.raises(BrokenCheckpoint, match="added_tokens_decoder"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("x", 1, 0)]),
    ],
)
def test_decoders_that_are_not_per_token_are_unsupported(decoder: Any) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(UnsupportedModel, match="decoder"):
        Tokenizer(backend)

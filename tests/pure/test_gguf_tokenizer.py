"""Tokenizers put together from GGUF metadata."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.text.gguf_tokenizer import PRE_TOKENIZERS
from engine.text.tokenizer import Tokenizer, gguf_tokenizer, load_tokenizer
from store.errors import BrokenFile
from store.formats.gguf import read_gguf_header
from tests.fakes.tiny_tokenizers import (
    CHATML,
    CONTROL,
    NORMAL,
    USER_DEFINED,
    byte_level_backend,
    byte_level_metadata,
    byte_level_vocabulary,
    sentencepiece_backend,
    sentencepiece_metadata,
    sentencepiece_vocabulary,
    write_gguf,
)

SPLITS = {
    "gpt-2": ["It", "'s", " 12345", " DON", "'", "T", " \n", " x"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", "5", " DON", "'", "T", " \n", " x"],
    "llama-bpe": ["It", "'s", " ", "123", "45", " DON", "'T", " \n", " x"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", "5", " DON", "'T", " \n", " x"],
    "default": ["It", "'", "s", " ", "123", "45", " DON", "'", "T", " \n", " x"],
}


def spellings(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=add_special_tokens)]


@given(st.text(), st.sampled_from(sorted(PRE_TOKENIZERS)))
def test_byte_level_text_comes_back(text: str, pre: str) -> None:
    tokenizer = gguf_tokenizer(byte_level_metadata(pre=pre, add_bos_token=False))
    if PRE_TOKENIZERS[pre].normalize_nfc:
        text = "".join(character for character in text if character.isascii())
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(st.text())
def test_byte_level_ids_equal_the_same_tokenizer_from_a_directory(text: str) -> None:
    tokenizer = gguf_tokenizer(byte_level_metadata())
    assert tokenizer.encode(text) == byte_level_backend().encode(text).ids


@given(st.text(st.sampled_from("helo w<s>é🙂\n'"), max_size=40))
def test_sentencepiece_ids_equal_the_same_tokenizer_from_a_directory(text: str) -> None:
    tokenizer = gguf_tokenizer(sentencepiece_metadata(add_bos_token=False))
    assert tokenizer.encode(text) == sentencepiece_backend().encode(text).ids


@pytest.mark.parametrize("pre", SPLITS)
def test_the_pre_tokenizer_cuts_the_text_as_the_model_was_trained(pre: str) -> None:
    text = "It's 12345 DON'T \n x"
    words = list(dict.fromkeys(SPLITS[pre]))
    tokens, _ = byte_level_vocabulary()
    known = {token.replace("\u0120", " ").replace("\u010a", "\n") for token in tokens}
    # A merge for every word, built up from its left, so that each word becomes one token.
    merges = []
    for word in words:
        spelled = word.replace(" ", "\u0120").replace("\n", "\u010a")
        for end in range(2, len(word) + 1):
            if spelled[:end] not in known:
                known.add(spelled[:end])
                tokens.append(spelled[:end])
            merges.append(f"{spelled[: end - 1]} {spelled[end - 1]}")
    metadata = byte_level_metadata(
        pre=pre, tokens=tokens, merges=list(dict.fromkeys(merges)), token_type=None, add_bos_token=False
    )
    assert spellings(gguf_tokenizer(metadata), text) == SPLITS[pre]


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["xyz"]), ("qwen2", ["x", "y", "z"])])
def test_llama_takes_a_word_of_the_vocabulary_whole_without_merges(pre: str, expected: list[str]) -> None:
    tokens, _ = byte_level_vocabulary()
    tokenizer = gguf_tokenizer(byte_level_metadata(pre=pre, tokens=[*tokens, "xyz"], token_type=None))
    assert spellings(tokenizer, "xyz", add_special_tokens=False) == expected


def test_a_merge_may_begin_with_a_space() -> None:
    tokens, _ = byte_level_vocabulary()
    metadata = byte_level_metadata(tokens=[*tokens, " ", " h"], token_type=None, merges=["  h"])
    assert gguf_tokenizer(metadata).vocab_size == len(tokens) + 2


def test_an_absent_pre_tokenizer_means_default() -> None:
    text = "It's 12345 (a+b)"
    explicit = gguf_tokenizer(byte_level_metadata(pre="default"))
    assert gguf_tokenizer(byte_level_metadata(pre=None)).encode(text) == explicit.encode(text)


@pytest.mark.parametrize(
    ("pre", "add_bos_token", "expected"),
    [
        ("gpt-2", None, ["hello"]),
        ("gpt-2", True, ["<|endoftext|>", "hello"]),
        ("llama-bpe", None, ["<|endoftext|>", "hello"]),
        ("llama-bpe", False, ["hello"]),
    ],
)
def test_bos_is_added_where_the_file_or_else_the_family_says(
    pre: str, add_bos_token: bool | None, expected: list[str]
) -> None:
    tokenizer = gguf_tokenizer(byte_level_metadata(pre=pre, add_bos_token=add_bos_token))
    assert spellings(tokenizer, "hello") == expected
    assert spellings(tokenizer, "hello", add_special_tokens=False) == ["hello"]


def test_eos_can_be_added_too() -> None:
    tokenizer = gguf_tokenizer(sentencepiece_metadata(add_eos_token=True))
    assert spellings(tokenizer, "hello") == ["<s>", " hello", "</s>"]


def test_sentencepiece_without_space_prefix_keeps_the_text_as_it_is() -> None:
    tokenizer = gguf_tokenizer(sentencepiece_metadata(add_space_prefix=False))
    assert spellings(tokenizer, "hello wo") == ["<s>", "hello", " wo"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def test_characters_outside_the_pieces_fall_back_to_bytes() -> None:
    tokenizer = gguf_tokenizer(sentencepiece_metadata(add_bos_token=False))
    assert tokenizer.encode("é€")[-3:] == [3 + byte for byte in "€".encode()]
    assert tokenizer.decode(tokenizer.encode("é€")) == "é€"


def test_user_defined_tokens_stay_whole_and_visible() -> None:
    tokens, _ = byte_level_vocabulary()
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3) + [USER_DEFINED]
    tokenizer = gguf_tokenizer(byte_level_metadata(tokens=[*tokens, "<think>"], token_type=types))
    assert tokenizer.encode("<think>hello") == [len(tokens), *tokenizer.encode("hello")]
    assert tokenizer.decode(tokenizer.encode("<think>hello")) == "<think>hello"
    assert tokenizer.special_token_ids == {0, 1, 2}


@pytest.mark.parametrize(
    ("fields", "template", "expected"),
    [
        ({}, None, (0,)),
        ({"eot_token_id": 2}, None, (0, 2)),
        ({"eot_token_id": 2, "eom_token_id": 1}, None, (0, 2, 1)),
        ({}, CHATML, (0, 2)),
        ({"eos_token_id": 2}, CHATML, (2,)),
        ({}, "{{ messages }}", (0,)),
        ({"token_type": None}, CHATML, (0,)),
    ],
)
def test_the_tokens_that_end_a_turn(fields: dict[str, Any], template: str | None, expected: tuple[int, ...]) -> None:
    metadata = byte_level_metadata(**fields)
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    assert gguf_tokenizer(metadata).eos_token_ids == expected


def test_a_file_on_disk_gives_the_same_tokenizer(tmp_path: Path) -> None:
    metadata = byte_level_metadata(pre="qwen2")
    tokenizer = load_tokenizer(write_gguf(tmp_path / "tiny.gguf", metadata))
    text = "hello wo 🙂<|im_end|>"
    assert tokenizer.encode(text) == gguf_tokenizer(metadata).encode(text)
    assert (tokenizer.vocab_size, tokenizer.bos_token, tokenizer.eos_token) == (269, "<|endoftext|>", "<|endoftext|>")


def test_the_strings_of_the_merges_are_never_held_together(tmp_path: Path) -> None:
    tokens, _ = byte_level_vocabulary()
    letters = [chr(code) for code in range(ord("A"), ord("Z") + 1)]
    pairs = [(first, second) for first in letters for second in letters]
    triples = [(first + second, third) for first, second in pairs[:300] for third in letters]
    merges = [*pairs, *triples]
    metadata = byte_level_metadata(
        tokens=[*tokens, *(left + right for left, right in merges)],
        merges=[f"{left} {right}" for left, right in merges],
        token_type=None,
        add_bos_token=False,
    )
    header = read_gguf_header(write_gguf(tmp_path / "large.gguf", metadata))
    tracemalloc.start()
    try:
        tokenizer = gguf_tokenizer(header.metadata)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tokenizer.encode("ABC") == [len(tokens) + merges.index(("AB", "C"))]
    # A token is a string, its id and an entry of a dict and of a list; a merge would be three strings and a tuple.
    assert peak_bytes < 175 * len(merges)


def test_a_truncated_file_is_broken(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", byte_level_metadata())
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(BrokenFile):
        load_tokenizer(path)


@pytest.mark.parametrize(("field", "value"), [("model", "bert"), ("model", None), ("pre", "tekken")])
def test_unknown_kinds_are_unsupported(field: str, value: str | None) -> None:
    with pytest.raises(UnsupportedModel, match="not supported; use a"):
        gguf_tokenizer(byte_level_metadata(**{field: value}))


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (byte_level_metadata(tokens=None), "tokens"),
        (byte_level_metadata(tokens=[1, 2]), "tokens"),
        (byte_level_metadata(merges=None), "merges"),
        (byte_level_metadata(merges=["nospace"]), "merge 'nospace' without a second part"),
        (byte_level_metadata(merges=["h e", " "]), "merge ' ' without a second part"),
        (byte_level_metadata(merges=[""]), "merge '' without a second part"),
        (byte_level_metadata(merges=["h nowhere"]), "BPE"),
        (byte_level_metadata(token_type=[1]), "token types"),
        (byte_level_metadata(eos_token_id=99999), "eos"),
        (byte_level_metadata(bos_token_id="x"), "bos"),
        (sentencepiece_metadata(scores=None), "scores"),
        (sentencepiece_metadata(scores=[0.0]), "scores"),
    ],
)
def test_contradicting_metadata_is_broken(metadata: dict[str, Any], reason: str) -> None:
    with pytest.raises(BrokenCheckpoint, match=reason):
        gguf_tokenizer(metadata)


@pytest.mark.parametrize(("better", "expected"), [("ab", ["ab", "c"]), ("bc", ["a", "bc"])])
def test_the_piece_with_the_better_score_is_merged_first(better: str, expected: list[str]) -> None:
    tokens, types, scores = sentencepiece_vocabulary()
    metadata = sentencepiece_metadata(
        tokens=[*tokens, "ab", "bc"],
        token_type=[*types, NORMAL, NORMAL],
        scores=[*scores, *(-1.0 if piece == better else -2.0 for piece in ("ab", "bc"))],
        add_space_prefix=False,
    )
    assert spellings(gguf_tokenizer(metadata), "abc", add_special_tokens=False) == expected

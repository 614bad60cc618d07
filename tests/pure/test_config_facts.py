"""A model that gets random weights is described by its config alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.residency.config_facts import config_facts
from store.errors import UnsupportedFormat


def test_facts_come_from_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 64, "vocab_size": 9, "rope": {}}')
    facts = config_facts(tmp_path)
    assert (facts.architecture, facts.embedding_length, facts.quantization) == ("qwen3", 64, "random")
    assert facts.num_parameters == 0, "too little is stated to tell"


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_config_that_cannot_be_read_is_one_sentence(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnsupportedFormat, match=r"config\.json"):
        config_facts(tmp_path)

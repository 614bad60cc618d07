"""`config_facts`: what is known of a model that will get random weights.

For load format "dummy", which needs no weight files and so cannot be described by them.  Put in
place of `store.facts.read_model_facts` by `app.server`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from store.errors import BrokenFile, UnsupportedFormat
from store.facts import ModelFacts, facts_of_checkpoint
from store.formats.json_object import read_json_file


def config_facts(path: Path) -> ModelFacts:
    """Facts of a directory with config.json; the number of parameters is what that lets expect.

    Raises `UnsupportedFormat`.
    """
    try:
        config = read_json_file(path / "config.json")
    except BrokenFile as error:
        raise UnsupportedFormat(
            f"{path} holds no readable config.json, which random weights need; name a model directory."
        ) from error
    facts = facts_of_checkpoint(config, (), has_chat_template=False)
    return msgspec.structs.replace(facts, quantization="random")

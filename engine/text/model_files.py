"""Read the small files beside a model's weights (tokenizer_config.json and its kind).

Knows that they are JSON objects or text and nothing about their keys.  Used by the modules of
`engine.text` that load something from a checkpoint directory, and by the offline API.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.api.config import LoadFormat
from engine.api.errors import BrokenCheckpoint
from store.errors import BrokenFile
from store.formats.json_object import read_json_file


def is_bare(model: Path, load_format: LoadFormat) -> bool:
    """Whether a model is to get random weights and has no tokenizer: prompts are then given as token ids."""
    return load_format == "dummy" and model.is_dir() and not (model / "tokenizer.json").is_file()


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or {} where there is no such file.

    Raises BrokenCheckpoint for a file that is not a JSON object in UTF-8.
    """
    if not path.is_file():
        return {}
    try:
        return read_json_file(path)
    except BrokenFile as error:
        raise BrokenCheckpoint(error.message) from error


def read_text_file(path: Path) -> str | None:
    """Return the text in `path`, or None where there is no such file; raises BrokenCheckpoint unless it is UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise BrokenCheckpoint(f"{path.name} is not UTF-8 text; pull the model again.") from error

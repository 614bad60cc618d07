"""`read_sentence_files`: the files that sentence-transformers writes beside a model, as one value.

modules.json lists the steps from text to vector; each step but the first has a directory with a config.json.
Knows no models; what is read is judged by `engine.pooling.config`, its only caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from store.formats.json_object import read_json_array_file, read_json_file

_TRANSFORMER_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class SentenceFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What the files say; `pooling_modes` are in sentence-transformers' words, several mean that all are joined.

    `choice_ids` are the tokens of a reranker that answers with one of two, `activation` is the class of a function.
    """

    pooling_modes: tuple[str, ...] = ()
    normalizes: bool = False
    max_length: int | None = None
    lowercase: bool = False
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    similarity: str = "cosine"
    choice_ids: tuple[int, int] | None = None
    activation: str | None = None


def read_sentence_files(directory: Path) -> SentenceFiles | None:
    """None where there is no modules.json.

    Raises `BrokenFile`, `BrokenCheckpoint`, or `UnsupportedModel` for steps that are not supported.
    """
    if not (directory / "modules.json").is_file():
        return None
    modules = _modules(directory)
    pooling = _config_of("Pooling", modules)
    general = read_json_if_there(directory / "config_sentence_transformers.json")
    prompts, default_prompt = _prompts(general)
    transformer = _transformer_config(modules.get("Transformer", directory))
    length = transformer.get("max_seq_length")
    if pooling.get("include_prompt") is False and any(prompts.values()):
        raise UnsupportedModel("Leaving prompts out of the pooling is not supported; choose another model.")
    return SentenceFiles(
        pooling_modes=_pooling_modes(pooling),
        normalizes="Normalize" in modules,
        max_length=length if type(length) is int and length > 0 else None,
        lowercase=transformer.get("do_lower_case") is True,
        prompts=prompts,
        default_prompt=default_prompt,
        similarity=_text(general.get("similarity_fn_name")) or "cosine",
        activation=_text(general.get("activation_fn")),
        choice_ids=_choice_ids(_config_of("LogitScore", modules)) if "LogitScore" in modules else None,
    )


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} where there is none.  Raises `BrokenFile`."""
    return read_json_file(path) if path.is_file() else {}


def _modules(directory: Path) -> dict[str, Path]:
    """The kinds of the steps, by the class that does each, with their directories."""
    modules: dict[str, Path] = {}
    for entry in read_json_array_file(directory / "modules.json"):
        kind = str(entry.get("type")).rpartition(".")[2] if isinstance(entry, dict) else ""
        folder = entry.get("path", "") if isinstance(entry, dict) else None
        if not isinstance(folder, str) or (folder and Path(folder).name != folder) or folder == "..":
            raise BrokenCheckpoint(f"modules.json names {folder!r}, which is no directory; pull the model again.")
        if kind not in ("Transformer", "Pooling", "Normalize", "LogitScore"):
            raise UnsupportedModel(
                f"The step {kind!r} from text to vector is not supported; choose a model of Transformer, Pooling and "
                "Normalize alone."
            )
        modules[kind] = directory / folder
    return modules


def _config_of(kind: str, modules: Mapping[str, Path]) -> dict[str, Any]:
    return read_json_if_there(modules[kind] / "config.json") if kind in modules else {}


def _transformer_config(directory: Path) -> dict[str, Any]:
    found = (directory / name for name in _TRANSFORMER_FILES)
    return next((read_json_file(path) for path in found if path.is_file()), {})


def _pooling_modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    stated = config.get("pooling_mode")
    if isinstance(stated, str):
        return (stated,)
    if isinstance(stated, list):
        return tuple(map(str, stated))
    return tuple(mode for key, mode in _LEGACY_MODES.items() if config.get(key) is True)


def _prompts(config: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """The prompts, and the name of the default one."""
    section, default = config.get("prompts"), config.get("default_prompt_name")
    entries = section.items() if isinstance(section, Mapping) else ()
    prompts = {name: text for name, text in entries if isinstance(text, str)}
    # The names "query" and "document" may be the default without a text, which then is empty.
    return prompts, default if default in prompts else None


def _choice_ids(config: Mapping[str, Any]) -> tuple[int, int]:
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if type(yes) is not int or type(no) is not int:
        raise UnsupportedModel("Scores by one token alone are not supported; choose another reranker.")
    return yes, no


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None

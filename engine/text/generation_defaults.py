"""Sampling defaults that the author of a model ships in generation_config.json.

Knows the file's keys only; whether a request overrides a default is decided by the callers,
`app.translate` and `engine.llm`.
"""

from __future__ import annotations

from pathlib import Path

from engine.text.model_files import read_json_object

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_generation_defaults(model: Path) -> dict[str, float | int]:
    """Return the sampling fields of generation_config.json that are numbers, by `SamplingParams` name.

    Empty for a GGUF file, for a directory without that file, and where `do_sample` is false
    (such files keep left-over values that the author does not use).
    """
    if not model.is_dir():
        return {}
    config = read_json_object(model / "generation_config.json")
    if config.get("do_sample") is False:
        return {}
    return {
        key: value
        for key in _SAMPLING_KEYS
        if isinstance(value := config.get(key), int | float) and not isinstance(value, bool)
    }

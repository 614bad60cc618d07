"""`read_pooling`: whether a model makes vectors or scores, and how, from the small files beside its weights.

These are the files of sentence-transformers (modules.json and what it names), config.json, and the metadata of a
GGUF file.  Reads no weights and runs nothing; called by the worker, which pools, and by the daemon's text side.

Files: https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.api.architectures import ENCODER_TYPES, HEADLESS_DECODERS
from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.pooling.sentence_files import SentenceFiles, read_json_if_there, read_sentence_files
from store.errors import BrokenFile
from store.formats.gguf import read_gguf_header
from store.formats.part_names import part_paths
from store.shape import shape_of_config

PoolingMode = Literal["mean", "cls", "last"]
Activation = Literal["sigmoid", "none"]

_MODES: Mapping[str, PoolingMode] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_GGUF_KINDS = ("none", "mean", "cls", "last", "rank")
"""`enum llama_pooling_type` of https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h"""
_YES_NO = ("yes", "no")
_LONGEST_CONTEXT = 1 << 26
"""Tokenizers say 10^30 where they mean that they know no limit."""


class ModelPooling(msgspec.Struct, frozen=True, kw_only=True):
    """How a model that is not there to generate is used.

    `task` is to turn a text into a vector, or to score a pair of texts.  `mode` takes the mean of all tokens' last
    hidden states, or that of the first ("cls") or the last token; a vector gets length 1 if `normalize`.  `max_length`
    (tokens, special ones included) is the longest text, or pair, that the model was made for; None: its context.
    `prompts` go before texts, by name; `default_prompt` names the one that does unless another is asked for.
    `lowercase` asks for texts in lower case whatever the tokenizer does.  `similarity` compares vectors.
    A score is `score_of` what the worker gives; with `choices`, tokens as text or ids, it is the probability of the
    first against the second as the next token, and else the output of the model's classification head.
    """

    task: Literal["embed", "score"]
    mode: PoolingMode
    normalize: bool = True
    max_length: int | None = None
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    lowercase: bool = False
    similarity: str = "cosine"
    choices: tuple[str, str] | tuple[int, int] | None = None
    activation: Activation = "none"

    def score_of(self, output: float) -> float:
        """The score that a worker's `output` means: between 0 and 1 unless `activation` is "none"."""
        if self.activation == "none":
            return output
        # Of both forms, the one whose exponential does not overflow.
        return 1 / (1 + math.exp(-output)) if output >= 0 else math.exp(output) / (1 + math.exp(output))


def read_pooling(path: Path) -> ModelPooling | None:
    """How the checkpoint directory or GGUF file at `path` pools; None for a model that generates text.

    Raises `BrokenCheckpoint`, or `UnsupportedModel` for a way to pool that is not supported.
    """
    try:
        if (path / "config.json").is_file():
            return _of_directory(path)
        gguf_file = path if path.is_file() else min(path.glob("*.gguf"), default=None)
        return _of_gguf(gguf_file) if gguf_file is not None and gguf_file.suffix.lower() == ".gguf" else None
    except BrokenFile as error:
        raise BrokenCheckpoint(error.message) from error


def _of_directory(path: Path) -> ModelPooling | None:
    config = read_json_if_there(path / "config.json")
    is_encoder = config.get("model_type") in ENCODER_TYPES
    classes = _texts(config.get("architectures"))
    files = read_sentence_files(path)
    if files is not None and files.choice_ids is not None:
        return _choosing(files.choice_ids, files)
    if is_encoder and any(name.endswith("ForSequenceClassification") for name in classes):
        return ModelPooling(
            task="score",
            mode="cls",
            activation=_activation(config, files),
            max_length=_max_length(path, config, files),
        )
    if files is None and not is_encoder:
        if _is_named_reranker(path):
            return _choosing(_YES_NO, None)
        return ModelPooling(task="embed", mode="last") if HEADLESS_DECODERS.intersection(classes) else None
    mode = _mode(files, is_encoder=is_encoder)
    max_length = _max_length(path, config, files)
    if files is None:
        return ModelPooling(task="embed", mode=mode, max_length=max_length)
    return ModelPooling(
        task="embed",
        mode=mode,
        # Lengths are of no account for cosines; where they are, the model decides.
        normalize=files.normalizes or files.similarity != "dot",
        max_length=max_length,
        prompts=files.prompts,
        default_prompt=files.default_prompt,
        lowercase=files.lowercase,
        similarity=files.similarity,
    )


def _mode(files: SentenceFiles | None, *, is_encoder: bool) -> PoolingMode:
    """How hidden states become one; the mean where no file says otherwise, as sentence-transformers does."""
    names = files.pooling_modes if files is not None and files.pooling_modes else ("mean",)
    mode = _MODES.get(names[0]) if len(names) == 1 else None
    if mode is None:
        raise UnsupportedModel(
            f"Pooling by {' and '.join(names)} is not supported; choose a model that pools by mean, cls or lasttoken."
        )
    if not is_encoder and mode != "last":
        raise UnsupportedModel(
            f"Pooling by {names[0]} is not supported for models that read from left to right; choose one that pools "
            "by lasttoken."
        )
    return mode


def _choosing(choices: tuple[str, str] | tuple[int, int], files: SentenceFiles | None) -> ModelPooling:
    return ModelPooling(
        task="score",
        mode="last",
        choices=choices,
        prompts=files.prompts if files is not None else {},
        default_prompt=files.default_prompt if files is not None else None,
    )


def _activation(config: Mapping[str, Any], files: SentenceFiles | None) -> Activation:
    """Of a cross-encoder with one label: sentence-transformers writes the class, and means the sigmoid by default."""
    section = config.get("sentence_transformers")
    named = section.get("activation_fn") if isinstance(section, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function") or (files.activation if files else None)
    match str(named or "Sigmoid").rpartition(".")[2]:
        case "Sigmoid":
            return "sigmoid"
        case "Identity":
            return "none"
    raise UnsupportedModel(f"Scores by the activation {named!r} are not supported; choose another reranker.")


def _max_length(path: Path, config: Mapping[str, Any], files: SentenceFiles | None) -> int | None:
    """What sentence-transformers' file says, else the tokenizer's, but no more than there are positions."""
    stated = files.max_length if files is not None else None
    if stated is None:
        stated = _length(read_json_if_there(path / "tokenizer_config.json").get("model_max_length"))
    lengths = [length for length in (stated, shape_of_config(config).context_length) if length is not None]
    return min(lengths, default=None)


def _length(value: object) -> int | None:
    return value if type(value) is int and 0 < value <= _LONGEST_CONTEXT else None


def _of_gguf(path: Path) -> ModelPooling | None:
    metadata = read_gguf_header(part_paths(path)[0], longest_array=0).metadata
    architecture = metadata.get("general.architecture")
    number = metadata.get(f"{architecture}.pooling_type", 0)
    kind = _GGUF_KINDS[number] if number in range(len(_GGUF_KINDS)) else f"type {number}"
    if kind == "rank" or _is_named_reranker(path):
        return _choosing(_YES_NO, None)
    if kind == "none":
        return None
    if kind != "last":
        raise UnsupportedModel(
            f"Pooling by {kind} is not supported for GGUF files; choose the model's original weights (safetensors)."
        )
    return ModelPooling(task="embed", mode="last")


def _is_named_reranker(path: Path) -> bool:
    """Whether a decoder's name says that it scores: Qwen3-Reranker's files, as published, do not.

    The name is that of its file or directory, or of its repository in a cache of the hub.
    """
    path = path.absolute()
    names = [path.name]
    snapshot = path if path.is_dir() else path.parent
    if snapshot.parent.name == "snapshots":
        names.append(snapshot.parent.parent.name)
    return any("rerank" in name.lower() for name in names)


def _texts(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

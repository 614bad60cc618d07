"""Which files of a repository a model needs: pure decisions on a list of names.

One weight format only, safetensors before GGUF; never pickles.  Knows nothing of how the list was
fetched; called by `pull`, and by `models` to tell quantisations apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from store.errors import ModelNotFound, UnsupportedFormat
from store.formats.part_names import parse_part_name, part_names
from store.names import RepoFile

_TEXT_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "modules.json",
        "sentence_bert_config.json",
        "sentence_roberta_config.json",
        "sentence_xlm-roberta_config.json",
        "config_sentence_transformers.json",
        "chat_template.jinja",
        "chat_template.json",
    }
)
_STEP_CONFIG = re.compile(r"\d+_[A-Za-z]+/config\.json")
"""Of a step between text and vector, as sentence-transformers numbers them: 1_Pooling."""
_SINGLE_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_GGUF_QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:I?Q\d(?:_[0-9A-Z]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|FP16|F32))(?=[-._/]|$)", re.IGNORECASE
)
_PREFERRED_QUANTIZATIONS = (
    "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q6_K", "Q8_0", "BF16", "F16", "F32",
)  # fmt: skip
"""Quantisations the engine reads, the usual best trade of size against quality first."""


@dataclass(frozen=True, slots=True)
class ChosenFiles:
    """`files` to fetch; `entry` is the GGUF to open, of several parts the first, or None when the snapshot
    directory is the model.
    """

    files: tuple[RepoFile, ...]
    entry: RepoFile | None


def choose_files(
    names: Sequence[RepoFile], *, file: RepoFile | None = None, quantization: str | None = None
) -> ChosenFiles:
    """Choose from a repository's files.  Raises ModelNotFound (no such file or quantisation) or UnsupportedFormat."""
    if file is not None:
        if file not in names:
            raise ModelNotFound(f"The repository has no file {file}; {_offer(names)}.")
        return _with_parts(file, names)
    if quantization is None and "config.json" in names and (weights := _safetensors(names)):
        texts = [name for name in names if name in _TEXT_FILES or _STEP_CONFIG.fullmatch(name)]
        return ChosenFiles((*sorted(texts), *weights), None)
    return _with_parts(_choose_gguf(names, quantization), names)


def gguf_quantization(name: str) -> str | None:
    """The quantisation a GGUF file's name announces, such as "Q4_K_M"."""
    matches = _GGUF_QUANTIZATION.findall(name.removesuffix(".gguf").removesuffix(".GGUF"))
    return matches[-1].upper().replace("FP16", "F16") if matches else None


def _safetensors(names: Sequence[RepoFile]) -> list[RepoFile]:
    if _SINGLE_WEIGHTS in names:
        return [RepoFile(_SINGLE_WEIGHTS)]
    shards = sorted(name for name in names if _is_shard(name))
    if not shards or _WEIGHTS_INDEX not in names:
        return []
    expected = part_names(shards[0])
    if len(expected) != len(shards):
        raise UnsupportedFormat(
            f"The repository lists {len(shards)} of its {len(expected)} weight files; choose another revision."
        )
    return [RepoFile(_WEIGHTS_INDEX), *shards]


def _is_shard(name: str) -> bool:
    part = parse_part_name(name)
    return part is not None and (part.stem, part.suffix) == ("model", ".safetensors")


def _choose_gguf(names: Sequence[RepoFile], quantization: str | None) -> RepoFile:
    models = _gguf_models(names)
    if not models:
        raise UnsupportedFormat(
            "The repository holds neither safetensors nor GGUF weights; choose a repository with one of those formats."
        )
    by_quantization: dict[str, RepoFile] = {}
    for name in models:
        by_quantization.setdefault(gguf_quantization(name) or "", name)
    if quantization is not None:
        if quantization not in by_quantization:
            raise ModelNotFound(f"The repository has no GGUF file of quantisation {quantization}; {_offer(names)}.")
        return by_quantization[quantization]
    if len(models) == 1:
        return models[0]
    for preferred in _PREFERRED_QUANTIZATIONS:
        if preferred in by_quantization:
            return by_quantization[preferred]
    raise UnsupportedFormat(f"The repository holds no GGUF quantisation that is picked by itself; {_offer(names)}.")


def _gguf_models(names: Sequence[RepoFile]) -> list[RepoFile]:
    """GGUF files that hold a language model or the first part of one: no image projectors, no calibration data."""
    return sorted(
        name
        for name in names
        if name.lower().endswith(".gguf")
        and ((part := parse_part_name(name)) is None or part.number == 1)
        and not any(word in name.lower() for word in ("mmproj", "imatrix"))
    )


def _with_parts(entry: RepoFile, names: Sequence[RepoFile]) -> ChosenFiles:
    """A GGUF file with all its parts, whichever of them was named.  Raises UnsupportedFormat if one is missing."""
    part = parse_part_name(entry)
    if part is None:
        return ChosenFiles((entry,), entry)
    known = set(names)
    parts = [RepoFile(name) for name in part.siblings()]
    present = [part for part in parts if part in known]
    if present != parts:
        raise UnsupportedFormat(
            f"The repository lists {len(present)} of the {part.count} parts of {part.stem}; choose another "
            "quantisation or revision."
        )
    return ChosenFiles(tuple(parts), parts[0])


def _offer(names: Sequence[RepoFile]) -> str:
    found = sorted({quantization for name in _gguf_models(names) if (quantization := gguf_quantization(name))})
    return "it offers " + ", ".join(found) if found else "it offers no GGUF quantisation at all"

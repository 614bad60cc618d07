"""`ModelFacts`: what a model is, read from headers and config.json alone.

Reads no weights and needs no torch, so that showing a model costs milliseconds.  `read_model_facts` reads files
of this machine, `store.remote_facts` those of a repository.  Called by `app` for `show`, the model listings
and the decision whether to load or to download a model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from store.errors import BrokenFile, UnsupportedFormat
from store.formats.gguf import GgufHeader
from store.formats.gguf_parts import read_gguf_model
from store.formats.json_object import read_json_file
from store.formats.part_names import parse_part_name
from store.formats.safetensors import read_safetensors_header
from store.parameter_estimate import estimated_parameters
from store.shape import (
    ModelShape,
    cache_bytes_per_token,
    dtype_bytes,
    identifier,
    shape_of_config,
    shape_of_gguf,
    text_section,
)

LONGEST_FACT_ARRAY = 4096
"""Items of a GGUF array that facts may come from, such as one number per layer."""

CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")

_MAX_LICENSE_LETTERS = 100
_GGUF_DTYPES = {"F32": "float32", "F16": "float16"}


class ModelFacts(msgspec.Struct, frozen=True):
    """Sizes in bytes, lengths in tokens; fields that the files do not state are None.

    `num_parameters` and `weight_bytes` are summed over the table of tensors, and `weight_bytes` is what they take
    as they are stored.  `quantization` is the type of most parameters, or the method that config.json names;
    `quantization_method` is that method alone.  `dtype` is what the model computes in ("bfloat16") and
    `kv_bytes_per_token` what a token takes in a KV cache of that type.  `tensor_types` are all types that occur.
    `num_labels` is of models that classify, and `has_own_code` says that config.json names Python files of its own.
    """

    architecture: str
    num_parameters: int
    quantization: str
    format: Literal["gguf", "safetensors"] = "safetensors"
    context_length: int | None = None
    embedding_length: int | None = None
    num_layers: int | None = None
    license: str | None = None
    has_chat_template: bool = False
    weight_bytes: int = 0
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    kv_bytes_per_token: int | None = None
    has_latent_cache: bool = False
    dtype: str | None = None
    classes: tuple[str, ...] = ()
    tensor_types: tuple[str, ...] = ()
    quantization_method: str | None = None
    num_experts: int | None = None
    has_sliding_window: bool = False
    activation: str | None = None
    num_labels: int | None = None
    has_own_code: bool = False
    intermediate_size: int | None = None
    vocab_size: int | None = None


class TensorFacts(Protocol):
    """What counts of a tensor here, whatever its format."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int: ...


def read_model_facts(path: Path) -> ModelFacts:
    """Facts of a .gguf file (all parts of one that is split), or of a directory with config.json and safetensors.

    Raises BrokenFile or UnsupportedFormat.
    """
    if not path.is_dir():
        return facts_of_gguf(path.name, read_gguf_model(path, longest_array=LONGEST_FACT_ARRAY).header)
    if not (path / "config.json").is_file():
        raise UnsupportedFormat(f"{path} holds no config.json; name a model directory.")
    config = read_json_file(path / "config.json")
    headers = [read_safetensors_header(file) for file in _weight_files(path)]
    tensors = [(tensor.dtype, tensor) for header in headers for tensor in header.values()]
    if not tensors:
        raise UnsupportedFormat(f"{path} holds no safetensors weights; pull the model again.")
    has_template = any((path / name).is_file() for name in CHAT_TEMPLATE_FILES)
    tokenizer_config = path / "tokenizer_config.json"
    if not has_template and tokenizer_config.is_file():
        has_template = bool(read_json_file(tokenizer_config).get("chat_template"))
    return facts_of_checkpoint(config, tensors, has_chat_template=has_template)


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files that are the model, beside which some publishers put a second copy in one piece."""
    files = sorted(directory.glob("*.safetensors"))
    whole = directory / "model.safetensors"
    if whole in files:
        return [whole]
    return [file for file in files if parse_part_name(file.name)] or files


def facts_of_gguf(name: str, header: GgufHeader) -> ModelFacts:
    """Facts of the header of a whole model; `name` is for the message of `BrokenFile`."""
    shape = shape_of_gguf(header.metadata)
    if not shape.architecture:
        raise BrokenFile(f"{name} does not name its architecture; choose another file, or pull the model again.")
    tensors = [(tensor.type_name, tensor) for tensor in header.tensors.values()]
    stored_bytes: Counter[str] = Counter()
    for type_name, tensor in tensors:
        stored_bytes[type_name] += tensor.num_bytes
    # Quantised weights were trained in bfloat16, or are as good in it.
    dtype = _GGUF_DTYPES.get(max(stored_bytes, key=stored_bytes.__getitem__, default=""), "bfloat16")
    facts = _facts(shape, tensors, dtype)
    return msgspec.structs.replace(
        facts,
        format="gguf",
        license=_shown_text(header.metadata.get("general.license")),
        has_chat_template="tokenizer.chat_template" in header.metadata,
    )


def facts_of_checkpoint(
    config: Mapping[str, Any], tensors: Iterable[tuple[str, TensorFacts]], *, has_chat_template: bool
) -> ModelFacts:
    """Facts of config.json and the (dtype, tensor) pairs of all safetensors files.

    Without tensors, `num_parameters` is what the config lets expect, and `weight_bytes` follows from its dtype.
    """
    shape = shape_of_config(config)
    text = text_section(config)
    dtype = identifier(text.get("dtype")) or identifier(text.get("torch_dtype"))
    method = _quantization_method(config.get("quantization_config"))
    facts = _facts(shape, list(tensors), dtype)
    if not facts.num_parameters:
        num_parameters = estimated_parameters(text, shape)
        weight_bytes = num_parameters * dtype_bytes(dtype)
        facts = msgspec.structs.replace(facts, num_parameters=num_parameters, weight_bytes=weight_bytes)
    return msgspec.structs.replace(
        facts,
        architecture=shape.architecture or "unknown",
        quantization=method.upper() if method else facts.quantization,
        quantization_method=method,
        has_chat_template=has_chat_template,
    )


def _quantization_method(section: object) -> str | None:
    """The method that config.json names; "unknown" for one that it does not name properly."""
    if not isinstance(section, dict) or not section:
        return None
    return identifier(section.get("quant_method")) or "unknown"


def _facts(shape: ModelShape, tensors: Sequence[tuple[str, TensorFacts]], dtype: str | None) -> ModelFacts:
    """What config and tensors give together; the rest is of one format alone."""
    elements: Counter[str] = Counter()
    for type_name, tensor in tensors:
        elements[type_name] += math.prod(tensor.shape)
    return ModelFacts(
        architecture=shape.architecture,
        num_parameters=elements.total(),
        quantization=elements.most_common(1)[0][0] if elements else "unknown",
        context_length=shape.context_length,
        embedding_length=shape.embedding_length,
        num_layers=shape.num_layers,
        weight_bytes=sum(tensor.num_bytes for _, tensor in tensors),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        kv_bytes_per_token=cache_bytes_per_token(shape, dtype),
        has_latent_cache=shape.has_latent_cache,
        dtype=dtype,
        classes=shape.classes,
        tensor_types=tuple(sorted(elements)),
        num_experts=shape.num_experts,
        has_sliding_window=shape.has_sliding_window,
        activation=shape.activation,
        num_labels=shape.num_labels,
        has_own_code=shape.has_own_code,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
    )


def _shown_text(value: object) -> str | None:
    """Text of a file's author as it may be shown: one short line without control characters."""
    if not isinstance(value, str):
        return None
    return "".join(filter(str.isprintable, value))[:_MAX_LICENSE_LETTERS] or None

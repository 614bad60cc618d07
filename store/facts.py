"""`ModelFacts`: what a model is, read from headers and config.json alone.

Reads no weights and needs no torch, so that showing a model costs milliseconds.  Called by `app`
for `show` and the model listings.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from store.errors import BrokenFile, UnsupportedFormat
from store.formats.gguf import read_gguf_header
from store.formats.safetensors import read_safetensors_header

_MAX_JSON_BYTES = 64 * 1024 * 1024


class ModelFacts(msgspec.Struct, frozen=True):
    """`num_parameters` is summed from tensor shapes; fields that the files do not state are None."""

    architecture: str
    num_parameters: int
    quantization: str
    context_length: int | None = None
    embedding_length: int | None = None
    num_layers: int | None = None
    license: str | None = None
    has_chat_template: bool = False


def read_model_facts(path: Path) -> ModelFacts:
    """Facts of a .gguf file, or of a directory with config.json and safetensors.

    Raises BrokenFile or UnsupportedFormat.
    """
    return _directory_facts(path) if path.is_dir() else _gguf_facts(path)


def _gguf_facts(path: Path) -> ModelFacts:
    header = read_gguf_header(path)
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise BrokenFile(f"{path.name} does not name its architecture; download it again.")
    license_name = metadata.get("general.license")
    return ModelFacts(
        architecture=architecture,
        num_parameters=sum(math.prod(tensor.shape) for tensor in header.tensors.values()),
        quantization=_dominant((tensor.type_name, tensor.shape) for tensor in header.tensors.values()),
        context_length=_integer(metadata, f"{architecture}.context_length"),
        embedding_length=_integer(metadata, f"{architecture}.embedding_length"),
        num_layers=_integer(metadata, f"{architecture}.block_count"),
        license=license_name if isinstance(license_name, str) else None,
        has_chat_template="tokenizer.chat_template" in metadata,
    )


def _directory_facts(path: Path) -> ModelFacts:
    config = _read_json(path / "config.json")
    headers = [read_safetensors_header(file) for file in sorted(path.glob("*.safetensors"))]
    tensors = [tensor for header in headers for tensor in header.values()]
    if not tensors:
        raise UnsupportedFormat(f"{path} holds no safetensors weights; pull the model again.")
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    tokenizer_config = path / "tokenizer_config.json"
    has_template = any((path / name).is_file() for name in ("chat_template.jinja", "chat_template.json"))
    return ModelFacts(
        architecture=str(config.get("model_type", "unknown")),
        num_parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        quantization=str(method).upper() if method else _dominant((tensor.dtype, tensor.shape) for tensor in tensors),
        context_length=_integer(config, "max_position_embeddings"),
        embedding_length=_integer(config, "hidden_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        has_chat_template=has_template
        or (tokenizer_config.is_file() and bool(_read_json(tokenizer_config).get("chat_template"))),
    )


def _dominant(tensors: Any) -> str:
    """The type that most elements have."""
    elements: Counter[str] = Counter()
    for type_name, shape in tensors:
        elements[type_name] += math.prod(shape)
    return elements.most_common(1)[0][0] if elements else "unknown"


def _integer(values: dict[str, Any], key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise BrokenFile(f"{path.name} is larger than any configuration file; download it again.")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnsupportedFormat(f"{path.parent} holds no {path.name}; name a model directory.") from error
    except (OSError, ValueError) as error:
        raise BrokenFile(f"{path.name} cannot be read as JSON; download it again.") from error
    if not isinstance(value, dict):
        raise BrokenFile(f"{path.name} is not a JSON object; download it again.")
    return value

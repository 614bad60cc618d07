"""Safetensors checkpoints: one file, or shards listed by `model.safetensors.index.json`.

Tensors are views into the memory-mapped files.  Opened by `engine.loading.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.api.architectures import unsupported_types
from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.layers.packed_weight import Coding
from engine.loading.hf_names import is_saved_bare, known_names
from engine.loading.mapped_file import MappedFile
from engine.loading.read_plan import StoredTensor
from engine.models.config import HAS_HEAD
from store.errors import BrokenFile
from store.formats.json_object import read_json_file
from store.formats.safetensors import SafetensorsTensor, read_safetensors_header

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}


class SafetensorsCheckpoint:
    """A directory with config.json and safetensors files; see `Checkpoint`."""

    def __init__(self, directory: Path) -> None:
        """Read the config and all headers.  Raises `BrokenFile`, `BrokenCheckpoint` or `UnsupportedModel`."""
        self.config = read_config_json(directory)
        self._shards: dict[Path, dict[str, SafetensorsTensor]] = {}
        names: set[str] = set()
        for path in _shard_paths(directory):
            header = read_safetensors_header(path)
            if twice := names & header.keys():
                raise BrokenCheckpoint(
                    f"The tensor {min(twice)!r} is in more than one shard of {directory.name}; pull the model again."
                )
            names |= header.keys()
            self._shards[path] = header
        _require_listed(directory, names)
        self.config[HAS_HEAD] = not is_saved_bare(names)
        self._rename(known_names(names, self.config.get("model_type")))
        _refuse_odd_dtypes(self._all_tensors())
        self.num_bytes = sum(tensor.num_bytes for tensor in self._all_tensors())
        self.config["dtype"] = self._dtype_name()

    def tensor_names(self) -> list[str]:
        return [tensor.name for tensor in self._all_tensors()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, header in self._shards.items():
            file = MappedFile(path)
            for tensor in header.values():
                view = file.view(tensor.offset, tensor.num_bytes, _DTYPES[tensor.dtype])
                yield tensor.name, view.view(tensor.shape)
                file.release(tensor.offset, tensor.num_bytes)

    def codings(self) -> dict[str, Coding]:
        return {}

    def float_dtype(self, name: str) -> torch.dtype:
        found = (header[name] for header in self._shards.values() if name in header)
        return next((_DTYPES[tensor.dtype] for tensor in found), torch.float32)

    def coded_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.tensors()

    def files(self) -> list[Path]:
        return list(self._shards)

    def stored_tensors(self) -> list[StoredTensor]:
        return [
            StoredTensor(tensor.name, path, tensor.offset, tensor.num_bytes, _DTYPES[tensor.dtype], tensor.shape)
            for path, header in self._shards.items()
            for tensor in header.values()
        ]

    def _rename(self, known: Mapping[str, str]) -> None:
        for path, header in self._shards.items():
            renamed = (replace(tensor, name=known[name]) for name, tensor in header.items())
            self._shards[path] = {tensor.name: tensor for tensor in renamed}

    def _all_tensors(self) -> list[SafetensorsTensor]:
        return [tensor for header in self._shards.values() for tensor in header.values()]

    def _dtype_name(self) -> str:
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        if isinstance(named, str):
            return named
        tensors = self._all_tensors()
        largest = max(tensors, key=lambda tensor: tensor.num_bytes) if tensors else None
        return str(_DTYPES[largest.dtype]).removeprefix("torch.") if largest else "float32"


def read_config_json(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint directory.  Raises `BrokenCheckpoint`."""
    return _read_json_object(directory / "config.json")


def _read_json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BrokenCheckpoint(
            f"{path.parent} has no {path.name}; give a checkpoint directory or pull the model again."
        )
    try:
        return read_json_file(path)
    except BrokenFile as error:
        raise BrokenCheckpoint(error.message) from error


def _weight_map(directory: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index; file names cannot leave the directory."""
    weight_map = _read_json_object(directory / _INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BrokenCheckpoint(f"{_INDEX_FILE} lists no tensors; pull the model again.")
    for file_name in weight_map.values():
        if (
            not isinstance(file_name, str)
            or Path(file_name).name != file_name
            or not file_name.endswith(".safetensors")
        ):
            raise BrokenCheckpoint(f"{_INDEX_FILE} names {file_name!r}, which is no shard; pull the model again.")
    return weight_map


def _shard_paths(directory: Path) -> list[Path]:
    if (directory / _SINGLE_FILE).exists():
        return [directory / _SINGLE_FILE]
    if (directory / _INDEX_FILE).exists():
        paths = [directory / file_name for file_name in sorted(set(_weight_map(directory).values()))]
        missing = [path.name for path in paths if not path.exists()]
        if missing:
            raise BrokenCheckpoint(
                f"{directory.name} lacks {len(missing)} of {len(paths)} shards, first {missing[0]}; "
                "pull the model again."
            )
        return paths
    raise UnsupportedModel(
        f"{directory} holds neither {_SINGLE_FILE} nor {_INDEX_FILE}; choose a model with safetensors or GGUF weights."
    )


def _require_listed(directory: Path, names: set[str]) -> None:
    if (directory / _SINGLE_FILE).exists():
        return
    absent = sorted(_weight_map(directory).keys() - names)
    if absent:
        raise BrokenCheckpoint(
            f"The shards of {directory.name} lack {len(absent)} listed tensors, first {absent[0]!r}; "
            "pull the model again."
        )


def _refuse_odd_dtypes(tensors: list[SafetensorsTensor]) -> None:
    if reason := unsupported_types((tensor.dtype for tensor in tensors), is_gguf=False):
        raise UnsupportedModel(reason)

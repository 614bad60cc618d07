"""GGUF and safetensors files, byte by byte: sound ones, and whatever a test wants to be wrong with them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf

U8, U16, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 4, 5, 6, 7, 8, 9, 10
F32_TENSOR, Q4_0_TENSOR, Q4_1_TENSOR = 0, 2, 3
_SCALARS = {U8: "<B", U16: "<H", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(kind: int, content: Any) -> bytes:
    return text(content) if kind == STRING else struct.pack(_SCALARS[kind], content)


def key(name: str, kind: int, content: Any) -> bytes:
    return text(name) + struct.pack("<I", kind) + value(kind, content)


def array(name: str, kind: int, items: list[Any]) -> bytes:
    head = text(name) + struct.pack("<IIQ", ARRAY, kind, len(items))
    return head + b"".join(value(kind, item) for item in items)


def tensor(name: str, dimensions: tuple[int, ...], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    keys: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3, alignment: int = 32
) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


def keys_of(metadata: dict[str, Any]) -> list[bytes]:
    """Metadata of texts, whole numbers and lists of them."""
    return [_key_of(name, content) for name, content in metadata.items()]


def _key_of(name: str, content: Any) -> bytes:
    if isinstance(content, list):
        return array(name, STRING if content and isinstance(content[0], str) else I32, content)
    return key(name, STRING if isinstance(content, str) else U32, content)


def safetensors_bytes(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    """A sound file of zeros; tensors are (dtype, shape, bytes)."""
    header, offset = {}, 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(offset)


def split_gguf(path: Path, num_parts: int) -> list[Path]:
    """Split the file as llama-gguf-split does: all metadata in the first part, the tensors spread over all."""
    reader = gguf.GGUFReader(path)
    per_part = -(-len(reader.tensors) // num_parts)
    paths = []
    for number in range(num_parts):
        part = path.with_name(f"{path.stem}-{number + 1:05d}-of-{num_parts:05d}.gguf")
        writer = gguf.GGUFWriter(part, "llama")
        if number == 0:
            for name, field in reader.fields.items():
                if name.startswith("GGUF.") or name == "general.architecture":
                    continue
                sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), field.types[0], sub_type)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", num_parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for stored in reader.tensors[number * per_part : (number + 1) * per_part]:
            writer.add_tensor(stored.name, stored.data, raw_dtype=stored.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(part)
    return paths

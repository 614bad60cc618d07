"""Facts of a catalogue model before anything of it is read: what `facts` would find in its files.

Pure.  Called where models are compared or searched without asking a hub; a pull reads the files themselves.
"""

from __future__ import annotations

from store.catalog import CatalogModel
from store.facts import ModelFacts
from store.shape import ModelShape, cache_bytes_per_token

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_TYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def stored_bytes(model: CatalogModel) -> int:
    """What the weights take on disk; of a file whose size the catalogue rounds, to three digits."""
    if model.file is not None:
        return model.file.size_bytes
    return model.stored_bytes or model.parameters * _DTYPE_BYTES[model.dtype]


def catalog_facts(model: CatalogModel) -> ModelFacts:
    """As `store.facts` has them of the files, `num_parameters` without copies of tied weights."""
    cached = 2 * model.layers * model.kv_heads * model.head_dim if model.kv_heads and model.head_dim else None
    shape = ModelShape(architecture=model.model_type, cached_elements=cached)
    is_gguf = model.quantization is not None
    return ModelFacts(
        architecture=model.model_type,
        num_parameters=model.parameters,
        quantization=model.quantization or _TYPE_NAMES[model.dtype],
        format="gguf" if is_gguf else "safetensors",
        context_length=model.context_length,
        num_layers=model.layers,
        license=model.license,
        has_chat_template=model.kind in ("chat", "code", "reasoning"),
        weight_bytes=stored_bytes(model),
        num_kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        kv_bytes_per_token=cache_bytes_per_token(shape, model.dtype),
        dtype=model.dtype,
        num_experts=model.num_experts,
    )

"""What the engine can run, as plain values and sentences: no torch.

The one place that says so.  The worker asks here when it opens a checkpoint, and `app` before anything is
downloaded, so both refuse with the same words.  Each function gives the sentence for what is not supported, or
None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

DECODER_TYPES = ("llama", "qwen2", "qwen3")
"""`model_type` of config.json, and `general.architecture` of GGUF files, of models that continue a text."""
ENCODER_TYPES = ("bert", "roberta", "xlm-roberta")
"""`model_type` of models that read a whole text at once."""
MODEL_TYPES = (*DECODER_TYPES, *ENCODER_TYPES)
"""Each has a file in `engine.models`, with underscores for hyphens."""

HEADLESS_DECODERS = frozenset({"LlamaModel", "Qwen2Model", "Qwen3Model"})
"""`architectures` of decoders that were saved without the head that continues a text: they make vectors."""
_ENCODER_CLASSES = frozenset(
    f"{family}{role}"
    for family in ("Bert", "Roberta", "XLMRoberta")
    for role in ("Model", "ForMaskedLM", "ForSequenceClassification")
)

READABLE_GGUF_TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
READABLE_DTYPES = ("F64", "F32", "F16", "BF16", "I64")
"""Of safetensors files; whole numbers are tables of positions, which some encoders carry along."""

DECODER_ACTIVATIONS = ("silu", "swish")
ENCODER_ACTIVATIONS = ("gelu",)


def unsupported_architecture(
    model_type: object, classes: Sequence[str], *, is_gguf: bool = False, has_own_code: bool = False
) -> str | None:
    """`classes` are the `architectures` of config.json, empty where there are none.

    `has_own_code` says that config.json names Python files of the repository, which then compute something else than
    the model type says.
    """
    is_encoder = model_type in ENCODER_TYPES
    known = not classes or any(_is_known_class(name, is_encoder=is_encoder) for name in classes)
    if is_encoder and is_gguf:
        return (
            f"GGUF files of {model_type} models are not supported; choose the model's original weights (safetensors)."
        )
    if is_encoder and known and has_own_code:
        return "The model computes with Python code of its own, which is not supported; choose another model."
    if model_type in MODEL_TYPES and known:
        return None
    named = classes[0] if classes else model_type
    return (
        f"The architecture {named!r} is not supported; choose a model of type {', '.join(MODEL_TYPES[:-1])} or "
        f"{MODEL_TYPES[-1]}."
    )


def unsupported_labels(num_labels: int | None) -> str | None:
    """`num_labels` of a model that classifies, None for others."""
    if num_labels in (None, 1):
        return None
    return f"A classifier with {num_labels} labels is not supported; choose a reranker, which has one."


def unsupported_activation(name: str, model_type: object) -> str | None:
    allowed = ENCODER_ACTIVATIONS if model_type in ENCODER_TYPES else DECODER_ACTIVATIONS
    if name in allowed:
        return None
    return f"The activation {name!r} is not supported; choose a model that uses {allowed[0]}."


def unsupported_quantization(*, is_quantized: bool) -> str | None:
    """For checkpoints whose config.json has a `quantization_config`."""
    if not is_quantized:
        return None
    return "Quantised safetensors checkpoints are not supported; choose the original weights or a GGUF file."


def unsupported_window(*, has_sliding_window: bool) -> str | None:
    if not has_sliding_window:
        return None
    return "Sliding-window attention is not supported; choose a model with full attention."


def unsupported_experts(num_experts: int | None) -> str | None:
    if not num_experts:
        return None
    return "This model is a mixture of experts, which is not supported; choose a dense model."


def unsupported_types(types: Iterable[str], *, is_gguf: bool) -> str | None:
    """`types` are those of all tensors."""
    readable = READABLE_GGUF_TYPES if is_gguf else READABLE_DTYPES
    odd = sorted(set(types) - set(readable))
    if not odd:
        return None
    better = f"file quantised as one of: {', '.join(readable)}" if is_gguf else "checkpoint of floats, or a GGUF file"
    return f"Tensors stored as {odd[0]} are not supported; choose a {better}."


def _is_known_class(name: str, *, is_encoder: bool) -> bool:
    return name in _ENCODER_CLASSES if is_encoder else name.endswith("ForCausalLM") or name in HEADLESS_DECODERS

"""What the engine can run, as plain values and sentences: no torch.

The one place that says so.  The worker asks here when it opens a checkpoint, and `app` before anything is
downloaded, so both refuse with the same words.  Each function gives the sentence for what is not supported, or
None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""`model_type` of config.json, and `general.architecture` of GGUF files; each has a file in `engine.models`."""

READABLE_GGUF_TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
READABLE_DTYPES = ("F64", "F32", "F16", "BF16")
"""Of safetensors files."""

ACTIVATIONS = ("silu", "swish")


def unsupported_architecture(model_type: object, classes: Sequence[str]) -> str | None:
    """`classes` are the `architectures` of config.json, empty where there are none."""
    generates = not classes or any(name.endswith("ForCausalLM") for name in classes)
    if model_type in MODEL_TYPES and generates:
        return None
    named = classes[0] if classes else model_type
    return (
        f"The architecture {named!r} is not supported; choose a text generation model of type "
        f"{', '.join(MODEL_TYPES[:-1])} or {MODEL_TYPES[-1]}."
    )


def unsupported_activation(name: str) -> str | None:
    if name in ACTIVATIONS:
        return None
    return f"The activation {name!r} is not supported; choose a model that uses silu."


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

"""A model is refused before its download if it cannot run here, and otherwise told what it will do without."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.residency.advice.acceptance import accept, why_unsupported
from app.residency.arithmetic.footprint import Host, footprint
from app.residency.arithmetic.memory import DeviceMemory
from store.errors import TooLargeForDevice, UnsupportedFormat
from store.facts import ModelFacts

GB = 10**9
QWEN_7B = ModelFacts(
    architecture="qwen2", num_parameters=7_600_000_000, quantization="BF16", context_length=131_072,
    weight_bytes=15_200_000_000, kv_bytes_per_token=57_344, classes=("Qwen2ForCausalLM",), tensor_types=("BF16",),
    activation="silu", dtype="bfloat16",
)  # fmt: skip


def host(total_gb: float, device: str = "cuda:0", **changes: Any) -> Host:
    return Host(DeviceMemory(device, int(total_gb * GB), 0), utilization=0.9, **changes)


def test_a_model_that_fits_is_accepted_without_a_word() -> None:
    assert accept(QWEN_7B, host(80)) is None


def test_weights_that_can_never_fit_are_refused() -> None:
    with pytest.raises(TooLargeForDevice, match=r"alone take 15\.2 GB and cuda:0 has 12\.0 GB; .*pull --force"):
        accept(QWEN_7B, host(12))


def test_a_context_that_does_not_fit_is_told() -> None:
    warning = accept(QWEN_7B, host(24))
    assert warning is not None
    assert "needs about 25.9 GB and cuda:0 has 24.0 GB" in warning
    assert "context of about 56,200 tokens" in warning
    assert accept(QWEN_7B, host(24, max_model_len=32_768)) is None


def test_weights_beyond_the_daemons_share_are_told() -> None:
    warning = accept(QWEN_7B, host(16))
    assert warning is not None
    assert "share of 0.9" in warning and "memory_limit" in warning


def test_a_quantised_model_takes_what_is_stored_on_the_cpu_alone() -> None:
    """7.6 billion parameters in 4.8 GB run in 8 GB of RAM, but a GPU expands them."""
    changes = {"format": "gguf", "weight_bytes": 4_800_000_000, "classes": (), "tensor_types": ("F32", "Q4_K")}
    facts = msgspec.structs.replace(QWEN_7B, context_length=4096, **changes)
    assert accept(facts, host(8, "cpu")) is None
    with pytest.raises(TooLargeForDevice, match="choose a smaller"):
        accept(facts, host(8))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architecture": "gemma3", "classes": ("Gemma3ForConditionalGeneration",)},
            "'Gemma3For",
        ),
        ({"architecture": "phi3", "classes": ()}, "'phi3' is not supported"),
        ({"classes": ("Qwen2ForSequenceClassification",)}, "not supported; choose a model of type llama"),
        ({"architecture": "bert", "classes": ("BertForQuestionAnswering",)}, "'BertForQuestionAnswering' is not"),
        ({"architecture": "bert", "classes": ("BertForSequenceClassification",), "num_labels": 3}, "3 labels"),
        ({"architecture": "bert", "classes": ("BertModel",), "activation": "relu"}, "'relu' .* uses gelu"),
        ({"architecture": "bert", "classes": (), "activation": None, "format": "gguf"}, "GGUF files of bert"),
        (
            {
                "architecture": "xlm-roberta",
                "classes": ("XLMRobertaModel",),
                "activation": "gelu",
                "has_own_code": True,
            },
            "code of its own",
        ),
        ({"quantization_method": "awq"}, "Quantised safetensors"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"activation": "gelu"}, "'gelu'"),
        ({"has_sliding_window": True}, "Sliding-window"),
        ({"tensor_types": ("BF16", "F8_E4M3")}, "stored as F8_E4M3"),
        ({"format": "gguf", "tensor_types": ("F32", "IQ4_XS")}, "stored as IQ4_XS .* Q4_K"),
    ],
)
def test_what_the_engine_cannot_run_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedFormat, match=words):
        accept(msgspec.structs.replace(QWEN_7B, **changes), host(1000))


def test_what_is_not_stated_is_no_reason_to_refuse() -> None:
    facts = ModelFacts(architecture="llama", num_parameters=1000, quantization="F32")
    assert why_unsupported(facts) is None
    assert accept(facts, host(4)) is None
    need = footprint(facts, host(4))
    assert need.total_bytes(need.context) == need.fixed_bytes


@given(
    num_parameters=st.integers(0, 10**12),
    stored_bits=st.integers(1, 64),
    kv_bytes=st.one_of(st.none(), st.integers(1, 10**7)),
    context=st.one_of(st.none(), st.integers(1, 10**7)),
    total=st.integers(0, 10**12),
    device=st.sampled_from(["cpu", "cuda:0"]),
)
def test_the_sums_add_up(
    num_parameters: int, stored_bits: int, kv_bytes: int | None, context: int | None, total: int, device: str
) -> None:
    facts = ModelFacts(
        architecture="llama", num_parameters=num_parameters, quantization="X", context_length=context,
        weight_bytes=num_parameters * stored_bits // 8, kv_bytes_per_token=kv_bytes,
    )  # fmt: skip
    here = Host(DeviceMemory(device, total, 0), utilization=0.9)
    need = footprint(facts, here)
    tokens = need.context_within(here.usable_bytes)
    assert 0 <= tokens <= need.context == (context or 0)
    if need.kv_bytes_per_token and tokens:
        assert need.total_bytes(tokens) <= here.usable_bytes
    if need.kv_bytes_per_token and tokens < need.context:
        assert need.total_bytes(tokens + 1) > here.usable_bytes
    try:
        warning = accept(facts, here)
    except TooLargeForDevice:
        assert need.weight_bytes > total
    else:
        assert (warning is None) == (need.total_bytes(need.context) <= here.usable_bytes)


@pytest.mark.parametrize(
    ("architecture", "class_name", "activation"),
    [
        ("bert", "BertModel", "gelu"),
        ("bert", "BertForSequenceClassification", "gelu"),
        ("roberta", "RobertaModel", "gelu"),
        ("xlm-roberta", "XLMRobertaForSequenceClassification", "gelu"),
        ("qwen3", "Qwen3Model", "silu"),
    ],
)
def test_models_for_vectors_and_scores_are_accepted(architecture: str, class_name: str, activation: str) -> None:
    facts = msgspec.structs.replace(
        QWEN_7B, architecture=architecture, classes=(class_name,), activation=activation, num_labels=1,
        kv_bytes_per_token=None, tensor_types=("F32", "I64"),
    )  # fmt: skip
    assert accept(facts, host(80)) is None

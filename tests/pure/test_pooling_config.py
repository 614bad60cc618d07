"""How a model pools, read from the small files beside its weights, as sentence-transformers writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.pooling.config import ModelPooling, read_pooling
from tests.fakes.gguf_files import gguf_bytes, keys_of

BERT = {"model_type": "bert", "architectures": ["BertModel"], "max_position_embeddings": 512}
XLM_R = {"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 32_768}
MEAN = {"word_embedding_dimension": 384, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
CLS = {"word_embedding_dimension": 384, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
LAST = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}
OLD_STEPS = ("sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling")
NEW_STEPS = (
    "sentence_transformers.base.modules.transformer.Transformer",
    "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
)
NORMALIZE = "sentence_transformers.models.Normalize"


def folder(directory: Path, config: dict[str, Any], **files: Any) -> Path:
    """A checkpoint's small files; names have `_json` for `.json` and `__` for a slash."""
    for name, content in {"config_json": config, **files}.items():
        path = directory / name.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
    return directory


def steps(*types: str) -> list[dict[str, Any]]:
    return [
        {"idx": index, "name": str(index), "path": f"{index}_{kind.rpartition('.')[2]}" if index else "", "type": kind}
        for index, kind in enumerate(types)
    ]


def test_all_minilm_as_it_is_published(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        BERT,
        modules_json=steps(*OLD_STEPS, NORMALIZE),
        sentence_bert_config_json={"max_seq_length": 256, "do_lower_case": False},
        tokenizer_config_json={"model_max_length": 512},
        config_sentence_transformers_json={"__version__": {"sentence_transformers": "2.0.0"}},
        **{"1_Pooling__config_json": MEAN},
    )
    assert read_pooling(path) == ModelPooling(task="embed", mode="mean", normalize=True, max_length=256)


def test_qwen3_embedding_as_it_is_published(tmp_path: Path) -> None:
    prompts = {"query": "Instruct: Find.\nQuery:", "document": ""}
    path = folder(
        tmp_path,
        QWEN3,
        modules_json=steps(*OLD_STEPS, NORMALIZE),
        tokenizer_config_json={"model_max_length": 131_072},
        config_sentence_transformers_json={
            "prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"
        },
        **{"1_Pooling__config_json": LAST},
    )  # fmt: skip
    expected = ModelPooling(task="embed", mode="last", max_length=32_768, prompts=prompts)
    assert read_pooling(path) == expected


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        (MEAN, "mean"),
        (CLS, "cls"),
        ({}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_both_spellings_of_the_files_are_read(tmp_path: Path, pooling: dict[str, Any], mode: str) -> None:
    path = folder(tmp_path, BERT, modules_json=steps(*NEW_STEPS), **{"1_Pooling__config_json": pooling})
    found = read_pooling(path)
    assert found is not None
    assert (found.task, found.mode, found.max_length, found.normalize) == ("embed", mode, 512, True)


def test_lengths_stay_where_the_model_compares_by_dot_product(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        BERT,
        modules_json=steps(*OLD_STEPS),
        config_sentence_transformers_json={"similarity_fn_name": "dot", "prompts": {"query": "q: "},
                                           "default_prompt_name": "query"},
        sentence_bert_config_json={"max_seq_length": None, "do_lower_case": True},
    )  # fmt: skip
    found = read_pooling(path)
    assert found is not None
    assert (found.normalize, found.similarity, found.default_prompt, found.lowercase) == (False, "dot", "query", True)


def test_an_encoder_without_sentence_files_takes_the_mean(tmp_path: Path) -> None:
    path = folder(tmp_path, XLM_R, tokenizer_config_json={"model_max_length": 10**30})
    assert read_pooling(path) == ModelPooling(task="embed", mode="mean", max_length=512)


@pytest.mark.parametrize(
    ("changes", "files", "activation"),
    [
        ({}, {}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, {}, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, {}, "sigmoid"),
        (
            {},
            {"modules_json": steps(NEW_STEPS[0]),
             "config_sentence_transformers_json": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            "none",
        ),
    ],
)  # fmt: skip
def test_a_cross_encoder_scores(
    tmp_path: Path, changes: dict[str, Any], files: dict[str, Any], activation: str
) -> None:
    config = {**XLM_R, "architectures": ["XLMRobertaForSequenceClassification"], **changes}
    path = folder(tmp_path, config, tokenizer_config_json={"model_max_length": 512}, **files)
    found = read_pooling(path)
    assert found is not None
    assert (found.task, found.mode, found.max_length, found.activation) == ("score", "cls", 512, activation)


@pytest.mark.parametrize(
    "name", ["Qwen3-Reranker-0.6B", "models--Qwen--Qwen3-Reranker-4B/snapshots/0123abcd"], ids=["folder", "cache"]
)
def test_a_reranking_decoder_is_known_by_its_name(tmp_path: Path, name: str) -> None:
    found = read_pooling(folder(tmp_path / name, QWEN3))
    assert found is not None
    assert (found.task, found.mode, found.choices) == ("score", "last", ("yes", "no"))


def test_a_reranking_decoder_is_known_by_its_files(tmp_path: Path) -> None:
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    score = {"true_token_id": 9693, "false_token_id": 2152}
    path = folder(tmp_path, QWEN3, modules_json=steps(NEW_STEPS[0], kind), **{"1_LogitScore__config_json": score})
    found = read_pooling(path)
    assert found is not None
    assert (found.task, found.choices) == ("score", (9693, 2152))


def test_a_decoder_without_a_head_embeds_and_one_with_it_generates(tmp_path: Path) -> None:
    headless = folder(tmp_path / "a", {**QWEN3, "architectures": ["Qwen3Model"]})
    assert read_pooling(headless) == ModelPooling(task="embed", mode="last")
    assert read_pooling(folder(tmp_path / "b" / "reranker" / "chat", QWEN3)) is None
    assert read_pooling(folder(tmp_path / "c", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})) is None
    assert read_pooling(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("name", "metadata", "expected"),
    [
        ("a.gguf", {"general.architecture": "qwen3", "qwen3.pooling_type": 3}, ("embed", "last")),
        ("a.gguf", {"general.architecture": "qwen3", "qwen3.pooling_type": 4}, ("score", "last")),
        ("Qwen3-Reranker-0.6B-Q8_0.gguf", {"general.architecture": "qwen3"}, ("score", "last")),
        ("a.gguf", {"general.architecture": "qwen3", "tokenizer.ggml.tokens": ["a", "b"]}, None),
    ],
)
def test_gguf_files_say_it_in_their_metadata(
    tmp_path: Path, name: str, metadata: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    (tmp_path / name).write_bytes(gguf_bytes(keys_of(metadata), []))
    for path in (tmp_path / name, tmp_path):
        found = read_pooling(path)
        assert (None if found is None else (found.task, found.mode)) == expected


@pytest.mark.parametrize(("number", "words"), [(1, "by mean is not"), (2, "by cls is not"), (9, "by type 9 is not")])
def test_gguf_files_that_pool_otherwise_are_refused(tmp_path: Path, number: int, words: str) -> None:
    metadata = {"general.architecture": "qwen3", "qwen3.pooling_type": number}
    (tmp_path / "a.gguf").write_bytes(gguf_bytes(keys_of(metadata), []))
    with pytest.raises(UnsupportedModel, match=words):
        read_pooling(tmp_path)


@pytest.mark.parametrize(
    ("config", "files", "words"),
    [
        (BERT, {"1_Pooling__config_json": {**MEAN, "pooling_mode_cls_token": True}}, "cls and mean"),
        (BERT, {"1_Pooling__config_json": {"pooling_mode": "max"}}, "by max is not supported"),
        (QWEN3, {"1_Pooling__config_json": MEAN}, "left to right"),
        (BERT, {"modules_json": steps(*OLD_STEPS, "sentence_transformers.models.Dense")}, "'Dense'"),
        (
            BERT,
            {"1_Pooling__config_json": {**MEAN, "include_prompt": False},
             "config_sentence_transformers_json": {"prompts": {"query": "q: "}}},
            "out of the pooling",
        ),
        (
            {**BERT, "architectures": ["BertForSequenceClassification"],
             "sentence_transformers": {"activation_fn": "somebody.Own"}},
            {},
            "'somebody.Own'",
        ),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any], words: str
) -> None:
    path = folder(tmp_path, config, **{"modules_json": steps(*OLD_STEPS), **files})
    with pytest.raises(UnsupportedModel, match=words):
        read_pooling(path)


@pytest.mark.parametrize("content", ["{", "{}", '[{"path": "../elsewhere"}]', "[1]"])
def test_a_broken_list_of_steps_is_one_sentence(tmp_path: Path, content: str) -> None:
    path = folder(tmp_path, BERT)
    (path / "modules.json").write_text(content, encoding="utf-8")
    with pytest.raises((BrokenCheckpoint, UnsupportedModel), match=r"modules\.json"):
        read_pooling(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
)


@given(json_values)
def test_no_content_of_a_file_is_a_crash(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    path = tmp_path_factory.mktemp("model")
    folder(
        path,
        BERT,
        modules_json=steps(*OLD_STEPS),
        sentence_bert_config_json={"max_seq_length": content, "do_lower_case": content},
        config_sentence_transformers_json={
            "prompts": content, "default_prompt_name": "query", "similarity_fn_name": content
        },
        **{"1_Pooling__config_json": {"include_prompt": content, "pooling_mode_mean_tokens": content}},
    )  # fmt: skip
    found = read_pooling(path)
    assert found is not None and found.mode == "mean"


@given(st.floats(allow_nan=False))
def test_a_score_is_a_probability_unless_it_is_not(output: float) -> None:
    sigmoid = ModelPooling(task="score", mode="cls", activation="sigmoid").score_of(output)
    assert 0.0 <= sigmoid <= 1.0
    if abs(output) < 30:
        assert math.isclose(sigmoid, 1 / (1 + math.exp(-output)), rel_tol=1e-12)
    assert ModelPooling(task="score", mode="cls").score_of(output) == output

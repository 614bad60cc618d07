"""Every encoder gives transformers' hidden states and scores, in one ragged batch, from a tiny random checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.attention.ragged import TorchRaggedAttention
from engine.loading.checkpoint import open_checkpoint
from engine.loading.loader import encoder_weight_bytes, load_encoder
from engine.models.encoder import EncoderModel
from engine.models.registry import encoder_class
from tests.fakes.checkpoints import VOCAB_SIZE, write_encoder_checkpoint

CPU = torch.device("cpu")
LENGTHS = (1, 7, 40, 40, 128, 3)
FAMILIES = ("bert", "roberta", "xlm-roberta")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def texts(lengths: Sequence[int] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    # Without the ids of padding, after which RoBERTa counts positions otherwise.
    return [torch.randint(4, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def load(path: Path) -> EncoderModel:
    return load_encoder(open_checkpoint(path), device=CPU, dtype=torch.float32, on_progress=lambda done, total: None)


def our_states(model: EncoderModel, sequences: list[torch.Tensor], types: list[torch.Tensor]) -> list[torch.Tensor]:
    """Hidden states of each text, all computed as one flat batch."""
    attention = TorchRaggedAttention(model.config.num_heads, model.config.head_dim)
    lengths = [len(sequence) for sequence in sequences]
    attention.begin_step(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.inference_mode():
        hidden = model(torch.cat(sequences), positions, torch.cat(types), attention)
    return list(hidden.split(lengths))


def second_halves(sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Type ids that call the second half of each text the second text of a pair."""
    return [(torch.arange(len(sequence)) >= len(sequence) / 2).long() for sequence in sequences]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes", [{}, {"num_attention_heads": 2, "hidden_size": 48}, {"layer_norm_eps": 0.1}], ids=["", "heads", "eps"]
)
def test_hidden_states_equal_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, family, **changes)
    sequences = texts()
    types = second_halves(sequences) if family == "bert" else [torch.zeros_like(sequence) for sequence in sequences]
    oracle = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    for sequence, type_ids, ours in zip(sequences, types, our_states(load(tmp_path), sequences, types), strict=True):
        with torch.inference_mode():
            expected = oracle(sequence[None], token_type_ids=type_ids[None]).last_hidden_state[0]
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_transformers(family: str, tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, family, role="ForSequenceClassification")
    sequences = texts()
    types = second_halves(sequences) if family == "bert" else [torch.zeros_like(sequence) for sequence in sequences]
    model = load(tmp_path)
    assert model.head is not None
    oracle = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        scores = model.head(torch.stack([states[0] for states in our_states(model, sequences, types)]))
        expected = torch.cat(
            [oracle(ids[None], token_type_ids=kinds[None]).logits for ids, kinds in zip(sequences, types, strict=True)]
        )
    assert expected.std() > 0.1
    torch.testing.assert_close(scores, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("length", [1, 2, 127, 128])
def test_lengths_up_to_the_longest(length: int, tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "xlm-roberta")
    model, sequences = load(tmp_path), texts((length,))
    assert model.config.max_position_embeddings == 128
    oracle = transformers.AutoModel.from_pretrained(tmp_path).eval()
    (ours,) = our_states(model, sequences, [torch.zeros_like(sequences[0])])
    with torch.inference_mode():
        expected = oracle(sequences[0][None]).last_hidden_state[0]
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("family", "role", "prefix"),
    [("bert", "", "bert."), ("xlm-roberta", "", "roberta."), ("bert", "ForMaskedLM", None),
     ("roberta", "ForMaskedLM", None)],
)  # fmt: skip
def test_names_with_a_prefix_and_heads_for_other_uses(
    family: str, role: str, prefix: str | None, tmp_path: Path
) -> None:
    write_encoder_checkpoint(tmp_path, family, role=role, prefix=prefix)
    sequences = texts((9,))
    (ours,) = our_states(load(tmp_path), sequences, [torch.zeros_like(sequences[0])])
    oracle = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        expected = oracle(sequences[0][None]).last_hidden_state[0]
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


def test_what_the_weights_will_take_is_known_before(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "bert", role="ForSequenceClassification")
    assert encoder_weight_bytes(open_checkpoint(tmp_path), torch.float32) == load(tmp_path).weight_bytes


def test_a_checkpoint_without_its_head_is_refused(tmp_path: Path) -> None:
    write_encoder_checkpoint(tmp_path, "bert", role="ForSequenceClassification")
    config = (tmp_path / "config.json").read_text()
    write_encoder_checkpoint(tmp_path, "bert")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(BrokenCheckpoint, match=r"lacks 2 tensors .*classifier\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"is_decoder": True}, "choose an encoder"),
        ({"auto_map": {"AutoModel": "own.Model"}}, "code of its own"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "2 labels"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], words: str) -> None:
    config = {
        "model_type": "bert", "architectures": ["BertModel"], "hidden_size": 8, "num_attention_heads": 2,
        "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9, **changes,
    }  # fmt: skip
    with pytest.raises(UnsupportedModel, match=words):
        encoder_class(config).config_class.from_hf(config)


def test_attention_is_the_same_in_any_order_of_texts() -> None:
    attention, lengths = TorchRaggedAttention(2, 8), (3, 3, 1, 5, 3)
    qkv = torch.randn(sum(lengths), 48, generator=torch.Generator().manual_seed(0))
    attention.begin_step(lengths)
    together = attention.attend(qkv)
    starts = [0, *itertools.accumulate(lengths)]
    for start, end in itertools.pairwise(starts):
        attention.begin_step((end - start,))
        torch.testing.assert_close(attention.attend(qkv[start:end]), together[start:end])

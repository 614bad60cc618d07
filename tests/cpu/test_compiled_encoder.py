"""The compiled steps of encoders against torch in float64, as this processor runs them and as others do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu, scaled_dot_product_attention

from engine.api.request import Pooling, Prompt
from engine.api.sampling import SamplingParams
from engine.attention.compiled_ragged import CompiledRaggedAttention
from engine.attention.ragged import TorchRaggedAttention
from engine.cpu import activations, attention_shape, catalogue
from engine.cpu.encoder_ops import CompiledEncoderOps
from engine.cpu.isa import Isa, host_isa
from engine.cpu.program import Capacity, Recorder, Rows
from engine.cpu.step import NUM_SEQUENCES, NUM_TOKENS, SEQUENCE_FIRST, SEQUENCE_TOKENS, STEP_SIZE
from engine.cpu.team import Team
from engine.layers.packed_splits import split
from engine.models.bert import Model, ModelConfig
from engine.models.encoder import EncoderModel
from engine.pooling.config import PoolingMode
from engine.runner.encoder_batch import EncoderBatch, build_encoder_batch
from engine.runner.recorded_encoder import RecordedEncoderSteps

MAX_TOKENS = 640
MAX_TEXTS = 12
LONGEST = 300
NO_ROWS = Rows(0, 0, 0, 0)
TEAMS = {size: Team(size, spins=False) for size in (1, 2)}
CPU = torch.device("cpu")

OWN = host_isa()
assert OWN is not None
PROCESSORS = {
    "own": OWN,
    "without a unit for tiles of floats": replace(OWN, has_amx_floats=False),
    "with few registers": Isa("widening", 4),
}


@pytest.fixture(params=PROCESSORS.values(), ids=list(PROCESSORS))
def processor(request: pytest.FixtureRequest) -> Iterator[Isa]:
    """What whoever records takes this processor for."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (activations, attention_shape):
            patch.setattr(module, "host_isa", lambda: request.param)
        yield request.param


@settings(max_examples=20)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(-30, 30), st.integers(0, 1000))
def test_split_matrices_keep_sixteen_bits(tiles: int, groups: int, exponent: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((16 * tiles, 32 * groups), generator=generator) * 2.0**exponent
    matrix = split((values[:10], values[10:]))
    assert bool(((matrix.dequantize() - values).abs() <= values.abs() * 2.0**-17).all())
    rows = torch.tensor([0, 16 * tiles - 1])
    assert torch.equal(matrix.dequantize_rows(rows), matrix.dequantize()[rows])


def test_gelu_is_that_of_the_normal_distribution() -> None:
    values = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([-math.inf, -1e30, -0.0, 1e-30, 1e30, math.inf])))
    columns = -(-len(values) // 32) * 32
    recorder = Recorder(Capacity(1, 1, 1), NO_ROWS, 1)
    source = recorder.buffer(columns)
    target = recorder.buffer(columns)
    place = recorder.address(source), recorder.stride(source)
    recorder.add(catalogue.gelu_floats_kernel(), *place, columns, recorder.address(target), NUM_TOKENS)
    program = recorder.finish()
    recorder.view(source)[0, : len(values)] = values
    recorder.view(source)[0, len(values) :] = torch.nan
    step = np.zeros(STEP_SIZE, dtype=np.int64)
    step[NUM_TOKENS] = 1
    program.run(TEAMS[1], step)
    found = recorder.view(target)[0]
    exact = gelu(values.double())
    exact[values == -math.inf] = 0.0
    is_finite = exact.isfinite()
    error = (found[: len(values)] - exact)[is_finite].abs()
    assert bool((error <= 1.5e-7 + exact[is_finite].abs() * 2.0**-23).all())
    assert torch.equal(found[: len(values)][~is_finite], exact[~is_finite].float())
    assert bool(found[len(values) :].isnan().all())


class Attention:
    """One attention, and a product with the identity, which makes rows of what attention packs for products."""

    def __init__(self, num_heads: int, head_dim: int, size: int) -> None:
        width = num_heads * head_dim
        recorder = Recorder(Capacity(MAX_TOKENS, MAX_TEXTS, MAX_TEXTS), NO_ROWS, size)
        ops = CompiledEncoderOps()
        # As `ops.linear` leaves them: in panels of 32 columns, or row by row.
        self._panels = torch.zeros(3 * width // 32, MAX_TOKENS, 32) if activations.splits_floats() else None
        if self._panels is not None:
            qkv = recorder.panels(3 * width, recorder.address(self._panels))
        else:
            qkv = recorder.buffer(3 * width)
        attention = CompiledRaggedAttention(num_heads, head_dim, LONGEST, recorder)
        with ops.recording(recorder):
            output = ops.linear_rows(attention.attend(qkv), ops.pack([torch.eye(width)]), None)
        self._shape = num_heads, head_dim
        self._program = recorder.finish()
        self._sequences = recorder.sequence_records
        self._output = recorder.view(output)
        self._qkv = recorder.view(qkv) if self._panels is None else self._panels
        self._team = TEAMS[size]

    def run(self, texts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Queries, keys and values of each text side by side [tokens, 3 H] -> [tokens, H] of each."""
        lengths = [len(text) for text in texts]
        step = np.zeros(STEP_SIZE, dtype=np.int64)
        step[NUM_TOKENS], step[NUM_SEQUENCES] = sum(lengths), len(lengths)
        self._sequences[: len(lengths), SEQUENCE_TOKENS] = lengths
        self._sequences[: len(lengths), SEQUENCE_FIRST] = np.cumsum([0, *lengths])[:-1]
        self._qkv.fill_(float("nan"))
        rows = torch.cat(list(texts))
        if self._panels is None:
            self._qkv[: sum(lengths)] = rows
        else:
            self._qkv[:, : sum(lengths)] = rows.unflatten(1, (-1, 32)).transpose(0, 1)
        self._program.run(self._team, step)
        return list(self._output[: sum(lengths)].clone().split(lengths))

    def assert_dense(self, text: torch.Tensor, found: torch.Tensor, *, is_split: bool) -> None:
        """`found` is that of `text` in float64, up to what its products must lose.

        A score that is off by d changes a weight by the factor e^d; products lose 2^-15, or one rounding per addend.
        """
        head_dim = self._shape[1]
        query, key, value = text.double().view(len(text), 3, *self._shape).permute(1, 2, 0, 3)
        exact = scaled_dot_product_attention(query, key, value).transpose(0, 1).flatten(1)
        largest_score = float((query.abs() @ key.abs().mT).max()) / math.sqrt(head_dim)
        unit = 2.0**-15 if is_split else (head_dim + len(text)) * 2.0**-24
        bound = 2 * unit * (largest_score + 4) * float(value.abs().max())
        assert float((found - exact).abs().max()) <= bound


@pytest.mark.parametrize("shape", [(3, 32), (1, 64), (2, 96)])
def test_attention_equals_torch(processor: Isa, shape: tuple[int, int]) -> None:
    attentions = [Attention(*shape, size) for size in TEAMS]

    @settings(max_examples=15)
    @given(
        st.lists(st.integers(1, LONGEST), min_size=1, max_size=MAX_TEXTS).filter(lambda all_: sum(all_) <= MAX_TOKENS),
        st.sampled_from([0.1, 1.0, 4.0]),
        st.integers(0, 1000),
    )
    @example([1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65], 1.0, 0)
    @example([256, 257], 4.0, 1)
    def check(lengths: list[int], magnitude: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        texts = [torch.randn((length, 3 * math.prod(shape)), generator=generator) * magnitude for length in lengths]
        for attention in attentions:
            together = attention.run(texts)
            for text, found in zip(texts, together, strict=True):
                attention.assert_dense(text, found, is_split=processor.has_amx_floats)
            assert torch.equal(attention.run(texts[-1:])[0], together[-1]), "a text depends on itself alone"

    check()


def test_attention_survives_scores_far_below_zero(processor: Isa) -> None:
    """A row's largest score may be so small that tokens beyond the end of the text, as zeros, would outweigh it."""
    attention = Attention(1, 32, 1)
    text = torch.ones((5, 96))
    text[:, :32] = -50
    text[:, 64:] = torch.randn((5, 32), generator=torch.Generator().manual_seed(0))
    (found,) = attention.run([text])
    attention.assert_dense(text, found, is_split=processor.has_amx_floats)


def config(**sizes: int) -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "model_type": "bert",
            "architectures": ["BertModel"],
            "vocab_size": 50,
            "hidden_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "intermediate_size": 160,
            "max_position_embeddings": LONGEST,
            "layer_norm_eps": 1e-12,
            **sizes,
        }
    )


def filled(shape: ModelConfig, make: Callable[..., EncoderModel], **options: Any) -> EncoderModel:
    """A model with the same random weights whatever it is made of."""
    model = make(shape, device=CPU, **options)
    generator = torch.Generator().manual_seed(1)
    for name, slot in list(model.weight_slots()):
        values = torch.randn(slot.shape, generator=generator)
        model.load_weight(name, values * 0.1 + name.endswith("LayerNorm.weight"))
    assert not model.missing_weights()
    return model


class Encoder:
    """A model's recorded steps, and the same model in float64."""

    def __init__(self, shape: ModelConfig, mode: PoolingMode, size: int) -> None:
        self._mode = mode
        self._exact = filled(shape, Model, dtype=torch.float64)
        self._attention = TorchRaggedAttention(shape.num_heads, shape.head_dim)
        ops = CompiledEncoderOps()
        self.model = filled(shape, Model, dtype=torch.float32, packed_ops=ops)
        sizes = {"max_num_tokens": MAX_TOKENS, "max_num_texts": MAX_TEXTS, "max_model_len": LONGEST}
        self._steps = RecordedEncoderSteps(self.model, ops, mode, TEAMS[size], **sizes)

    def run(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        return self._steps.run(_batch(texts)).clone()

    @torch.inference_mode()
    def exact(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        batch = _batch(texts)
        self._attention.begin_step(batch.lengths)
        hidden = self._exact(*torch.from_numpy(batch.inputs), self._attention)
        if self._exact.head is not None:
            return torch.stack([self._exact.head(hidden[start]) for start in batch.starts[:-1]])
        states = [hidden[start:end] for start, end in zip(batch.starts, batch.starts[1:], strict=False)]
        pick = {"mean": lambda state: state.mean(0), "cls": lambda state: state[0], "last": lambda state: state[-1]}
        return torch.stack([pick[self._mode](state) for state in states])


def _batch(texts: Sequence[Sequence[int]]) -> EncoderBatch:
    """Texts, the second half of each of which is the second of a pair."""
    prompts = [
        Prompt(index + 1, tuple(text), 0, SamplingParams(), pooling=Pooling("embed", second_start=len(text) // 2))
        for index, text in enumerate(texts)
    ]
    return build_encoder_batch(prompts, num_types=2)


def random_texts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 50, length).tolist() for length in lengths]


@pytest.mark.parametrize(
    ("mode", "size", "sizes"),
    [
        ("mean", 2, {}),
        ("cls", 1, {"hidden_size": 96, "num_attention_heads": 1, "intermediate_size": 32}),
        ("last", 1, {"hidden_size": 96, "num_attention_heads": 3, "intermediate_size": 320}),
    ],
)
def test_steps_equal_torch(processor: Isa, mode: PoolingMode, size: int, sizes: dict[str, int]) -> None:
    encoder = Encoder(config(**sizes), mode, size)
    for lengths in ([1], [3, 1, 2], [17, 40, 32, 16, 1], [300, 5, 64, 200, 33]):
        texts = random_texts(lengths, seed=len(lengths))
        found, exact = encoder.run(texts), encoder.exact(texts)
        assert float((found - exact).abs().max()) <= (1e-4 if processor.has_amx_floats else 5e-6)


def test_a_text_is_the_same_alone_and_among_others(processor: Isa) -> None:
    """To the last bit, also when another text's numbers are no numbers."""
    encoder = Encoder(config(), "mean", 2)
    texts = sorted(random_texts([5, 40, 33, 2, 128, 16], seed=3), key=len)
    alone = torch.cat([encoder.run([text]) for text in texts])
    assert torch.equal(encoder.run(texts), alone)
    broken = 17
    texts = [[token % broken for token in text] for text in texts]
    alone = torch.cat([encoder.run([text]) for text in texts])
    texts[3][7] = broken
    with torch.no_grad():
        encoder.model.embeddings.words[broken] = torch.nan
    found = encoder.run(texts)
    assert bool(found[3].isnan().all())
    others = torch.arange(len(texts)) != 3
    assert torch.equal(found[others], alone[others])


def test_a_classifier_scores_the_first_token() -> None:
    shape = replace(config(), head="pooler")
    encoder = Encoder(shape, "cls", 1)
    texts = random_texts([4, 9, 30], seed=4)
    found, exact = encoder.run(texts), encoder.exact(texts)
    assert found.shape == (3, 1)
    assert float((found - exact).abs().max()) <= 1e-4

"""Compiled paged attention against dense attention over the same keys, for ragged batches in shuffled blocks."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.api.errors import InsufficientMemory
from engine.attention.backend import AttentionMetadata, AttentionSpec, CacheSpec, HeadNorms
from engine.attention.compiled_paged import CompiledPagedAttention
from engine.attention.heads import split_heads
from engine.cpu.attention_shape import CHUNK_TOKENS
from engine.cpu.program import Capacity, Recorder, Rows
from engine.cpu.step import NUM_SEQUENCES, NUM_TOKENS, STEP_SIZE
from engine.cpu.team import Team
from engine.layers.rotary import Rotation

CPU = torch.device("cpu")
MAX_TOKENS = 96
MAX_SEQUENCES = 12
MAX_CONTEXT = 4 * CHUNK_TOKENS
SHAPES = [(9, 3, 64), (4, 4, 16), (8, 2, 80), (8, 1, 128), (20, 1, 32), (2, 2, 256)]  # heads, KV heads, head_dim
TEAMS = {size: Team(size, spins=False) for size in (1, 2, 3)}

Sequences = list[tuple[int, int]]
"""Context length and tokens of this step, those of the context included."""


@dataclass(frozen=True)
class Batch:
    """Random numbers of one step; `queries`, `keys` and `values` [context or tokens, heads, head_dim] by sequence."""

    sequences: Sequences
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def only(self, index: int) -> Batch:
        """The step of one sequence."""
        parts = (self.queries, self.keys, self.values)
        return Batch([self.sequences[index]], *([part[index]] for part in parts))


def random_batch(model: Recorded, sequences: Sequences, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def heads(count: int, num_heads: int) -> torch.Tensor:
        return torch.randn((count, num_heads, model.spec.head_dim), generator=generator)

    num_kv_heads = model.spec.num_kv_heads
    return Batch(
        sequences,
        [heads(tokens, model.num_heads) for _, tokens in sequences],
        [heads(context, num_kv_heads) for context, _ in sequences],
        [heads(context, num_kv_heads) for context, _ in sequences],
    )


class Recorded:
    """One attention layer, the second of two, recorded for inputs that can be set."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        norms: HeadNorms | None = None,
        team_size: int = 1,
    ) -> None:
        self.num_heads, num_kv_heads, head_dim = shape
        self.spec = CacheSpec(2, num_kv_heads, head_dim, block_size, dtype)
        self.norms = norms
        self.team_size = team_size
        self.backend = CompiledPagedAttention(AttentionSpec(self.spec, self.num_heads, MAX_SEQUENCES), CPU)
        self.num_blocks = MAX_SEQUENCES * MAX_CONTEXT // block_size
        self.backend.allocate(self.num_blocks)
        self.tables = torch.zeros((MAX_SEQUENCES, MAX_CONTEXT // block_size), dtype=torch.int32)
        rows = Rows(0, 0, self.tables.data_ptr(), self.tables.stride(0) * 4)
        recorder = Recorder(Capacity(MAX_TOKENS, MAX_SEQUENCES, 1), rows, team_size)
        self.records = recorder.sequence_records
        qkv = recorder.buffer((self.num_heads + 2 * num_kv_heads) * head_dim)
        rotation = Rotation(recorder.buffer(head_dim // 2), recorder.buffer(head_dim // 2))
        self.backend.record_on(recorder)
        output = self.backend.attend(1, qkv, rotation, norms)
        self.program = recorder.finish()
        handles = (qkv, rotation.cos, rotation.sin, output)
        self.qkv, self.cos, self.sin, self.output = (recorder.view(handle) for handle in handles)
        self.slots = torch.frombuffer(_bytes_at(recorder.slots, 8 * recorder.max_tokens), dtype=torch.int64)

    def attend(self, batch: Batch, team: Team | None = None) -> list[torch.Tensor]:
        """Store what comes before the step, run the step, and return its output by sequence."""
        keys, values = self.backend._keys[:, 1], self.backend._values[:, 1]
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
        blocks = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(len(batch.sequences)))
        self.tables[:] = blocks[: self.tables.numel()].view(self.tables.shape)
        first = 0
        for index, (context, count) in enumerate(batch.sequences):
            row = len(batch.sequences) - 1 - index  # rows are in any order
            positions = torch.arange(context)
            ids = self.tables[row, positions // self.spec.block_size].long()
            offsets = positions % self.spec.block_size
            earlier = slice(0, context - count)
            keys[ids[earlier], :, :, offsets[earlier]] = batch.keys[index][earlier].to(self.spec.dtype)
            values[ids[earlier], :, offsets[earlier]] = batch.values[index][earlier].to(self.spec.dtype)
            new = slice(context - count, context)
            flat = (batch.queries[index], batch.keys[index][new], batch.values[index][new])
            self.qkv[first : first + count] = torch.cat(flat, dim=1).flatten(1)
            self.slots[first : first + count] = (ids * self.spec.block_size + offsets)[new]
            self.cos[first : first + count], self.sin[first : first + count] = tables(positions[new], self.spec)
            self.records[index] = row, context - count, count, first
            first += count
        step = np.zeros(STEP_SIZE, dtype=np.int64)
        step[NUM_TOKENS], step[NUM_SEQUENCES] = first, len(batch.sequences)
        self.program.run(team or TEAMS[self.team_size], step)
        return list(self.output[:first].clone().split([count for _, count in batch.sequences]))

    def expected(self, batch: Batch) -> list[torch.Tensor]:
        """The same by dense attention in float64."""
        return [
            self._dense(context - count, queries, keys, values)
            for (context, count), queries, keys, values in zip(
                batch.sequences, batch.queries, batch.keys, batch.values, strict=True
            )
        ]

    def _dense(self, start: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        count, context = len(queries), len(keys)
        flat = torch.cat((queries, keys[start:], values[start:]), dim=1).flatten(1)
        rotation = Rotation(*tables(torch.arange(start, context), self.spec))
        query, key, value = split_heads(flat, self.spec.num_kv_heads, self.spec.head_dim, rotation, self.norms)
        group = self.num_heads // self.spec.num_kv_heads
        keys, values = (
            torch.cat((old[:start], new)).to(self.spec.dtype).double().repeat_interleave(group, 1)
            for old, new in ((keys, key), (values, value))
        )
        scores = torch.einsum("thd,lhd->htl", query.double(), keys) * self.spec.head_dim**-0.5
        unseen = torch.arange(context) > torch.arange(start, context)[:, None]
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        return torch.einsum("htl,lhd->thd", weights, values).float().reshape(count, -1)


def _bytes_at(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * count).from_address(address)).cast("B")


def tables(positions: torch.Tensor, spec: CacheSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of some rotation."""
    angles = positions[:, None] * 0.7 ** torch.arange(spec.head_dim // 2)
    return angles.cos(), angles.sin()


_MODELS: dict[tuple, Recorded] = {}


def model_of(shape: tuple[int, int, int], **options) -> Recorded:  # type: ignore[no-untyped-def]
    key = (shape, *sorted(options.items()))
    if key not in _MODELS:
        _MODELS[key] = Recorded(shape, **options)
    return _MODELS[key]


def assert_right(model: Recorded, sequences: Sequences, seed: int = 0) -> None:
    batch = random_batch(model, sequences, seed)
    tolerance = 3e-6 if model.spec.dtype == torch.float32 else 2e-3
    for found, expected in zip(model.attend(batch), model.expected(batch), strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-5)


# Decodes first, then prompts: fresh, chunked, behind a cached prefix, of one token; at edges of vectors and chunks.
MIXED = [(1, 1), (16, 1), (17, 1), (256, 1), (257, 1), (900, 1), (33, 33), (300, 20), (512, 2), (600, 1), (7, 7)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_equals_dense_attention(shape, dtype):
    assert_right(model_of(shape, dtype=dtype), MIXED)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("team_size", [2, 3])
def test_equals_dense_attention_for_block_and_team_sizes(block_size, team_size):
    model = model_of((9, 3, 64), block_size=block_size, team_size=team_size)
    assert_right(model, MIXED)
    assert_right(model, [(1000, 1)])
    assert_right(model, [(1000, 7), (30, 2)])


def test_heads_are_normed():
    generator = torch.Generator().manual_seed(1)
    weights = (torch.rand(64, generator=generator) + 0.5 for _ in range(2))
    model = Recorded((4, 2, 64), norms=HeadNorms(*weights, eps=1e-2))
    assert_right(model, MIXED)


@st.composite
def sequences_of_steps(draw: st.DrawFn) -> Sequences:
    contexts = st.one_of(st.integers(1, 40), st.integers(1, MAX_CONTEXT))
    decodes = [(context, 1) for context in draw(st.lists(contexts, max_size=6))]
    room = MAX_TOKENS - len(decodes)
    prompts: Sequences = []
    for context in draw(st.lists(contexts, min_size=0 if decodes else 1, max_size=4)):
        count = draw(st.integers(1, min(context, room - 4 + len(prompts))))
        prompts.append((context, count))
        room -= count
        if room < 5:
            break
    return decodes + prompts


@settings(max_examples=40)
@given(sequences_of_steps(), st.sampled_from(SHAPES), st.sampled_from([1, 2]), st.integers(0, 999))
@example([(1, 1)], SHAPES[0], 1, 0)
def test_any_mix_equals_dense_attention(sequences, shape, team_size, seed):
    assert_right(model_of(shape, team_size=team_size), sequences, seed)


@settings(max_examples=25)
@given(sequences_of_steps(), st.sampled_from(SHAPES), st.integers(0, 999))
def test_a_row_is_the_same_alone_in_a_batch_and_for_any_team(sequences, shape, seed):
    alone, among = model_of(shape), model_of(shape, team_size=2)
    batch = random_batch(alone, sequences, seed)
    together, shared = alone.attend(batch), among.attend(batch)
    for index in range(len(sequences)):
        assert torch.equal(together[index], shared[index])
        assert torch.equal(together[index], alone.attend(batch.only(index))[0])


def test_a_decode_is_the_same_as_the_last_token_of_its_prompt():
    model = model_of((9, 3, 64))
    batch = random_batch(model, [(700, 17)], seed=3)
    prompt = model.attend(batch)[0]
    # Keys before the step are taken as they are, so the decode gets those of the prompt's other tokens rotated.
    spec = model.spec
    positions = torch.arange(700 - 17, 699)
    keys = batch.keys[0].clone()
    flat = torch.cat((batch.queries[0][:-1], keys[683:699], batch.values[0][683:699]), dim=1).flatten(1)
    keys[683:699] = split_heads(flat, spec.num_kv_heads, spec.head_dim, Rotation(*tables(positions, spec)), None)[1]
    decode = model.attend(Batch([(700, 1)], [batch.queries[0][-1:]], [keys], batch.values))[0]
    torch.testing.assert_close(decode, prompt[-1:], atol=1e-6, rtol=0)


def test_one_thread_may_do_all_the_work_of_a_team():
    """Split contexts are merged by whoever comes last, also if that is one thread that does every piece."""
    model = model_of((9, 3, 64), team_size=3)
    batch = random_batch(model, [(1000, 1), (513, 1)], seed=4)
    together = model.attend(batch)
    arguments = model.program._arguments
    instructions = model.program._instructions.copy()

    kernel_type = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
    step = np.zeros(STEP_SIZE, dtype=np.int64)
    step[NUM_TOKENS], step[NUM_SEQUENCES] = 2, 2
    model.output.fill_(0.0)
    arguments[:, 0] = 0
    for index in (0, 2):  # the plan, then attention; what is stored stays
        address, argument_address = (int(number) for number in instructions[index])
        for rank in (2, 1, 0) if index else (0,):
            kernel_type(address)(argument_address, step.ctypes.data, rank, 3)
    assert torch.equal(model.output[:2], torch.cat(together))


def test_tokens_without_a_slot_are_stored_nowhere():
    model = model_of((4, 4, 16))
    keys, values = model.backend._keys, model.backend._values
    keys.zero_()
    values.zero_()
    model.slots[:2] = -1
    model.qkv[:2] = 1.0
    model.tables[:] = 0
    model.records[0] = 0, 0, 2, 0
    step = np.zeros(STEP_SIZE, dtype=np.int64)
    step[NUM_TOKENS], step[NUM_SEQUENCES] = 2, 1
    model.program.run(TEAMS[1], step)
    assert not keys.any() and not values.any()


def test_what_it_does_not_serve_is_said():
    def reasons(**changes) -> list[str]:  # type: ignore[no-untyped-def]
        fields = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": torch.float16}
        cache = CacheSpec(**{**fields, **changes})
        return CompiledPagedAttention.reasons_unsupported(AttentionSpec(cache, 4, 1), CPU)

    assert reasons() == []
    assert "head_dim 72" in reasons(head_dim=72)[0]
    assert "head_dim 512" in reasons(head_dim=512)[0]
    assert "bfloat16" in reasons(dtype=torch.bfloat16)[0]
    assert "block_size 8" in reasons(block_size=8)[0]
    assert "evenly" in reasons(num_kv_heads=3)[0]
    spec = AttentionSpec(CacheSpec(1, 2, 64, 16, torch.float16), 4, 1)
    assert "not on cuda" in CompiledPagedAttention.reasons_unsupported(spec, torch.device("cuda"))[0]


def test_a_cache_that_does_not_fit_is_said():
    backend = CompiledPagedAttention(AttentionSpec(CacheSpec(1, 2, 64, 16, torch.float16), 4, 1), CPU)
    with pytest.raises(InsufficientMemory, match="could not be allocated"):
        backend.allocate(1 << 44)


def test_it_is_recorded_and_not_called():
    backend = CompiledPagedAttention(AttentionSpec(CacheSpec(1, 2, 64, 16, torch.float16), 4, 1), CPU)
    metadata = AttentionMetadata(0, *[torch.empty(0)] * 4, (), ())
    with pytest.raises(NotImplementedError, match="recorded"):
        backend.begin_step(metadata)
    with pytest.raises(NotImplementedError, match="not captured"):
        backend.prompt_tiles(16, 0, 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="narrows an x86 processor's features")
def test_narrower_processors_compute_the_same():
    """Some of these tests, in a process that compiles for an older processor: smaller tiles, more slabs."""
    if not {"avx2", "fma", "f16c"} <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip("this processor has no AVX2 to try")
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
    command = [sys.executable, "-m", "pytest", "-x", "-k", "shape0 or last_token", __file__]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert outcome.returncode == 0, outcome.stdout[-2000:]

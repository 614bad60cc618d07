"""Paged decode attention against dense attention, for ragged batches in shuffled blocks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from engine.kernels import decode_plan
from engine.kernels.decode_attention import decode_attention
from engine.kernels.decode_plan import (
    DecodeTuning,
    DecodeWorkspace,
    allocate_workspace,
    default_tuning,
    plan_decode,
)

EPS = 1e-6
FP32_TOLERANCE = 2e-5
# Items of a tile or two, so that even short contexts are cut into several.
MANY_ITEMS = DecodeTuning(tile=16, busy_programs=64, spare_programs=16, start_us=0, combine_us=0)
HELD = DecodeTuning(tile=16, busy_programs=32, spare_programs=8, start_us=0, combine_us=0, holds_first_tile=True)
ONE_ITEM = DecodeTuning(tile=32, combine_us=1e6)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Case:
    """One step of S decodes; a context length of 0 is padding."""

    qkv: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    rows: torch.Tensor
    context_lens: torch.Tensor
    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | tuple[None, None]

    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of the newest tokens, normed and rotated, in float64."""
        num_kv_heads, head_dim = self.key_cache.shape[1], self.key_cache.shape[3]
        heads = self.qkv.double().unflatten(1, (-1, head_dim))
        query, key, value = heads.tensor_split([heads.shape[1] - 2 * num_kv_heads, heads.shape[1] - num_kv_heads], 1)
        return self._prepared(query, self.norms[0]), self._prepared(key, self.norms[1]), value

    def _prepared(self, heads: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is not None:
            heads = heads * (heads.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()
        first, second = heads.chunk(2, -1)
        cos, sin = self.cos.double()[:, None], self.sin.double()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def reference(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output [S, H, D] with NaN for padding, and both caches as they should be afterwards."""
        query, key, value = self.heads()
        key_cache, value_cache = self.key_cache.double(), self.value_cache.double()
        output = torch.full_like(query, float("nan"))
        block_size = key_cache.shape[2]
        for sequence, context_len in enumerate(self.context_lens.tolist()):
            if context_len == 0:
                continue
            slot = int(self.slots[sequence])
            key_cache[slot // block_size, :, slot % block_size] = key[sequence]
            value_cache[slot // block_size, :, slot % block_size] = value[sequence]
            blocks = self.block_tables[self.rows[sequence]][: -(-context_len // block_size)].long()
            group = query.shape[1] // key_cache.shape[1]
            keys, values = (
                cache[blocks].transpose(1, 2).flatten(0, 1)[:context_len].repeat_interleave(group, 1)
                for cache in (key_cache, value_cache)
            )
            scores = torch.einsum("hd,lhd->hl", query[sequence], keys) * query.shape[2] ** -0.5
            output[sequence] = torch.einsum("hl,lhd->hd", scores.softmax(-1), values)
        return output, key_cache, value_cache


def make_case(
    context_lens: list[int],
    device: torch.device,
    *,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    normed: bool = False,
    seed: int = 0,
) -> Case:
    """Random sequences in shuffled blocks and shuffled block table lines; what no sequence holds is NaN."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    num_sequences = len(context_lens)
    counts = [-(-context_len // block_size) for context_len in context_lens]
    num_blocks = sum(counts) + 2
    free_blocks = torch.randperm(num_blocks, generator=generator).tolist()
    lines = torch.randperm(num_sequences + 3, generator=generator)[:num_sequences].tolist()
    block_tables = torch.zeros((num_sequences + 3, max(counts) + 2), dtype=torch.int32)
    caches = [torch.full((num_blocks, num_kv_heads, block_size, head_dim), float("nan")) for _ in range(2)]
    slots = []
    for line, count, context_len in zip(lines, counts, context_lens, strict=True):
        blocks = [free_blocks.pop() for _ in range(count)]
        block_tables[line, :count] = torch.tensor(blocks, dtype=torch.int32)
        for cache in caches:
            for position in range(context_len - 1):
                cache[blocks[position // block_size], :, position % block_size] = random(num_kv_heads, head_dim)
        newest = context_len - 1
        slots.append(blocks[newest // block_size] * block_size + newest % block_size if context_len else -1)
    angles = random(num_sequences, head_dim // 2)
    num_heads = num_kv_heads * group
    return Case(
        qkv=random(num_sequences, (num_heads + 2 * num_kv_heads) * head_dim).to(device, dtype),
        key_cache=caches[0].to(device, dtype),
        value_cache=caches[1].to(device, dtype),
        block_tables=block_tables.to(device),
        rows=torch.tensor(
            [line if n else -1 for line, n in zip(lines, context_lens, strict=True)], dtype=torch.int32
        ).to(device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32).to(device),
        slots=torch.tensor(slots).to(device),
        cos=angles.cos().to(device),
        sin=angles.sin().to(device),
        norms=(random(head_dim).to(device, dtype), random(head_dim).to(device, dtype)) if normed else (None, None),
    )


def workspace_for(case: Case, tuning: DecodeTuning) -> DecodeWorkspace:
    _, num_kv_heads, _, head_dim = case.key_cache.shape
    num_heads = case.qkv.shape[1] // head_dim - 2 * num_kv_heads
    device = case.qkv.device
    return allocate_workspace(len(case.rows), num_heads, num_kv_heads, head_dim, case.qkv.dtype, device, tuning)


def check(
    case: Case,
    tuning: DecodeTuning,
    tolerance: float = FP32_TOLERANCE,
    workspace: DecodeWorkspace | None = None,
    reads_early: bool = False,
) -> None:
    """Run once on copies of the caches; outputs, caches and counters must be as they should."""
    workspace = workspace or workspace_for(case, tuning)
    expected, expected_keys, expected_values = case.reference()
    key_cache, value_cache = case.key_cache.clone(), case.value_cache.clone()
    plan = plan_decode(case.rows, case.context_lens, workspace, tuning)
    # Also the ordinary launch that early reads need between the plan and the attention.
    out = torch.full((len(case.rows), expected[0].numel()), float("nan"), dtype=case.qkv.dtype, device=case.qkv.device)
    decode_attention(
        case.qkv,
        key_cache,
        value_cache,
        case.block_tables,
        plan,
        case.slots,
        case.cos,
        case.sin,
        case.norms[0],
        case.norms[1],
        EPS,
        out,
        reads_early=reads_early,
    )
    torch.testing.assert_close(out.double(), expected.flatten(1), rtol=tolerance, atol=tolerance, equal_nan=True)
    for cache, original, wanted in (
        (key_cache, case.key_cache, expected_keys),
        (value_cache, case.value_cache, expected_values),
    ):
        torch.testing.assert_close(cache.double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
        stored = wanted.isnan() != original.isnan()
        assert torch.equal(cache[~stored].nan_to_num(7), original[~stored].nan_to_num(7))
    assert not workspace.counters.any()


RAGGED = [1, 0, 2, 16, 17, 33, 0, 64, 65, 130]


@pytest.mark.parametrize("tuning", [MANY_ITEMS, HELD, ONE_ITEM, DecodeTuning(tile=64, num_stages=2)])
def test_ragged_batch_with_padding(device, tuning):
    check(make_case(RAGGED, device), tuning)


def test_head_norms(device):
    check(make_case(RAGGED[-4:], device, normed=True), MANY_ITEMS)


@pytest.mark.parametrize("tuning", [HELD, MANY_ITEMS])
def test_reading_before_the_kernel_before_ends(device, tuning):
    check(make_case(RAGGED, device), tuning, reads_early=True)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_head_and_block_sizes(device, head_dim, block_size):
    case = make_case([70, 16, 33], device, head_dim=head_dim, block_size=block_size, num_kv_heads=1, normed=True)
    check(case, HELD)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_groups(device, group):
    check(make_case([40, 1, 67], device, group=group), MANY_ITEMS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tuning", [MANY_ITEMS, ONE_ITEM])
def test_half_precision(device, dtype, tuning):
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bfloat16 as if they were integers")
    check(make_case([5, 90, 64], device, head_dim=128, dtype=dtype, normed=True), tuning, tolerance=2e-2)


def test_one_long_sequence_among_short_ones_is_cut_into_many_items(device):
    case = make_case([3, 700, 0, 20], device, num_kv_heads=1, group=3)
    workspace = workspace_for(case, MANY_ITEMS)
    check(case, MANY_ITEMS, workspace=workspace)
    assert int((workspace.items[:, 0] == 1).sum()) > 20


def test_a_workspace_serves_one_step_after_another(device):
    workspace = workspace_for(make_case(RAGGED, device), MANY_ITEMS)
    for seed, context_lens in enumerate([RAGGED, RAGGED[::-1], [9, 150], [0, 0, 1], RAGGED]):
        check(make_case(context_lens, device, seed=seed), MANY_ITEMS, workspace=workspace)


def test_prefill_tokens_after_the_decodes_are_left_alone(device):
    case = make_case([20, 35], device)
    workspace = workspace_for(case, MANY_ITEMS)
    plan = plan_decode(case.rows[:1], case.context_lens[:1], workspace, MANY_ITEMS)
    key_cache = case.key_cache.clone()
    out = torch.full((2, 4 * 64), float("nan"), device=device)
    arguments = (plan, case.slots, case.cos, case.sin, None, None, EPS, out)
    decode_attention(case.qkv, key_cache, case.value_cache.clone(), case.block_tables, *arguments)
    expected = case.reference()[0].flatten(1)
    torch.testing.assert_close(out[0].double(), expected[0], rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)
    assert out[1].isnan().all()
    assert (key_cache.isnan() != case.key_cache.isnan()).sum() == 2 * 64


def planned(
    context_lens: list[int], device: torch.device, tuning: DecodeTuning, num_kv_heads: int = 2
) -> list[list[int]]:
    """The items of a plan in use, after checking that they cover every context once, the longest of them first."""
    contexts = torch.tensor(context_lens, dtype=torch.int32)
    rows = torch.where(contexts > 0, torch.arange(len(contexts), dtype=torch.int32) + 7, -1)
    workspace = allocate_workspace(len(contexts), 2 * num_kv_heads, num_kv_heads, 128, torch.bfloat16, device, tuning)
    workspace.items.fill_(5)
    plan = plan_decode(rows.to(device), contexts.to(device), workspace, tuning)
    items = workspace.items[: plan.max_items].tolist()
    used = [item for item in items if item[0] >= 0]
    assert items[: len(used)] == used

    covered = dict.fromkeys(range(len(contexts)), 0)
    for index, (sequence, start, end, row, first_item, num_items, holds_newest, _) in enumerate(used):
        assert start == covered[sequence] and start % tuning.tile == 0 and end > start
        covered[sequence] = end
        assert row == sequence + 7
        assert first_item <= index < first_item + num_items
        assert holds_newest == (end == context_lens[sequence]) == (index == first_item + num_items - 1)
    assert list(covered.values()) == context_lens
    lengths = [-(-end // tuning.tile) for _, start, end, *_ in used if start == 0]
    assert lengths == sorted(lengths, reverse=True)
    return used


@pytest.mark.parametrize("num_sequences", [1, 5, 64, 300])
@pytest.mark.parametrize("longest", [1, 60, 5000, 500_000])
@pytest.mark.parametrize("tuning", [DecodeTuning(tile=32), MANY_ITEMS])
def test_plan_covers_every_token_once(device, num_sequences, longest, tuning):
    generator = torch.Generator().manual_seed(longest)
    context_lens = torch.randint(0, longest + 1, (num_sequences,), generator=generator).tolist()
    planned([longest, *context_lens[1:]], device, tuning)


@settings(max_examples=40, derandomize=True)
@given(
    context_lens=st.lists(
        st.one_of(st.integers(0, 70), st.integers(0, 3000), st.integers(0, 1 << 19)), min_size=1, max_size=40
    ),
    tile=st.sampled_from([16, 64]),
    spare_programs=st.integers(0, 40),
    busy_programs=st.integers(0, 40),
    num_kv_heads=st.integers(1, 9),
)
def test_plan_covers_any_contexts(context_lens, tile, spare_programs, busy_programs, num_kv_heads):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tuning = DecodeTuning(tile=tile, spare_programs=spare_programs, busy_programs=busy_programs, combine_us=0.0)
    planned(context_lens, device, tuning, num_kv_heads)


@dataclass(frozen=True)
class Batch:
    """Contexts, and the number of items that an H200 (132 multiprocessors) should cut the first into."""

    name: str
    context_lens: list[int]
    fewest: int
    most: int


@pytest.mark.parametrize(
    "batch",
    [
        Batch("one wave needs no cut", [512] * 64, 1, 1),
        Batch("many waves need no cut", [512] * 256, 1, 1),
        Batch("a little more than one wave is better cut", [2048] * 70, 2, 4),
        Batch("alone and short, as short as a tile", [512], 8, 16),
        Batch("alone and long, as many as keep memory busy", [32768], 24, 40),
        Batch("few", [512] * 4, 4, 8),
        Batch("long among short", [32768, *[512] * 63], 20, 33),
        Batch("short among long", [512, *[32768] * 15], 1, 1),
    ],
    ids=lambda batch: batch.name,
)
def test_a_context_is_cut_where_that_saves_time(device, monkeypatch, batch):
    monkeypatch.setattr("engine.kernels.decode_plan.num_multiprocessors", lambda device: 132)
    tuning = default_tuning(len(batch.context_lens), 128, torch.bfloat16, device)
    items = planned(batch.context_lens, device, tuning, num_kv_heads=8)
    (num_items,) = {item[5] for item in items if item[0] == 0}
    assert batch.fewest <= num_items <= batch.most


def test_too_small_a_workspace_is_refused(device):
    case = make_case([5, 5, 5], device)
    workspace = allocate_workspace(2, 4, 2, 64, torch.float32, device, MANY_ITEMS)
    with pytest.raises(ValueError, match="too small for 3 sequences"):
        plan_decode(case.rows, case.context_lens, workspace, MANY_ITEMS)


@pytest.mark.parametrize("kibibytes", [64, 100, 164, 228])
@pytest.mark.parametrize("row_bytes", [128, 256, 512, 1024])
@pytest.mark.parametrize("num_sequences", [1, 16, 256])
def test_tuning_fits_the_shared_memory_of_smaller_gpus(kibibytes, row_bytes, num_sequences):
    tuning = decode_plan._best_tuning(num_sequences, row_bytes)
    fitted = tuning.within(kibibytes * 1024, row_bytes)
    in_flight = 2 * fitted.tile * row_bytes * (fitted.num_stages - 1) * fitted.programs_per_multiprocessor
    assert in_flight <= 0.9 * kibibytes * 1024
    assert fitted.tile >= 16 and fitted.num_stages >= 2 and fitted.programs_per_multiprocessor >= 1
    if kibibytes == 228:
        assert fitted == tuning

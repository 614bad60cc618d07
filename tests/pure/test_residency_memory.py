"""What a worker may take, and what containers report."""

from __future__ import annotations

from pathlib import Path

import msgspec

from app.residency.devices import container_memory, measure
from app.residency.memory import (
    MINIMUM_WORKING_BYTES,
    DeviceMemory,
    declared_bytes,
    least_needed_bytes,
    worker_budget_bytes,
)
from engine.api.wire import WorkerFacts
from store.facts import ModelFacts

GIB = 2**30


def test_the_first_worker_gets_its_share_less_what_others_hold() -> None:
    assert worker_budget_bytes(DeviceMemory("cuda:0", 24 * GIB, 0), 0.5, []) == 12 * GIB
    assert worker_budget_bytes(DeviceMemory("cuda:0", 24 * GIB, 2 * GIB), 0.5, []) == 10 * GIB


def test_our_own_workers_hold_what_they_declared_even_if_it_is_not_touched_yet() -> None:
    memory = DeviceMemory("cuda:0", 24 * GIB, 3 * GIB)

    assert worker_budget_bytes(memory, 1.0, [8 * GIB, 4 * GIB]) == 12 * GIB


def test_what_is_in_use_beyond_that_belongs_to_other_programs() -> None:
    memory = DeviceMemory("cuda:0", 24 * GIB, 14 * GIB)

    assert worker_budget_bytes(memory, 1.0, [8 * GIB]) == 10 * GIB


def test_the_budget_may_be_negative() -> None:
    assert worker_budget_bytes(DeviceMemory("cuda:0", 24 * GIB, 23 * GIB), 0.5, []) == -11 * GIB


def test_a_worker_declares_weights_and_pool() -> None:
    # DeepSeek-R1-Distill-Qwen-1.5B in bf16: 28 layers × 2 KV heads × 128 → 28,672 bytes a token.
    facts = WorkerFacts(
        architecture="qwen2", dtype="bfloat16", device="cuda:0", max_model_len=131072, vocab_size=151936,
        num_parameters=1_777_088_000, weight_bytes=3_554_176_000, kv_bytes_per_token=28_672, num_kv_blocks=26_653,
        block_size=16, max_num_seqs=256, load_seconds=1.0,
    )  # fmt: skip

    assert declared_bytes(facts) == 3_554_176_000 + 426_448 * 28_672
    assert round(facts.max_concurrency, 2) == 3.25


def test_the_least_a_model_needs() -> None:
    """A GPU computes in half precision; the CPU keeps what is stored."""
    facts = ModelFacts(architecture="llama", num_parameters=1000, quantization="Q4_1", weight_bytes=625)

    assert least_needed_bytes(facts, "cuda:0", "auto") == 2000 + MINIMUM_WORKING_BYTES
    assert least_needed_bytes(facts, "cpu", "auto") == 625 + MINIMUM_WORKING_BYTES
    assert least_needed_bytes(facts, "cpu", "none") == 2000 + MINIMUM_WORKING_BYTES
    floats = msgspec.structs.replace(facts, weight_bytes=4000)
    assert least_needed_bytes(floats, "cpu", "auto") == 4000 + MINIMUM_WORKING_BYTES
    assert least_needed_bytes(floats, "cpu", "int8") == 1000 + MINIMUM_WORKING_BYTES


def test_container_limits_leave_file_pages_out(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 200\nactive_file 50\n")

    assert container_memory(tmp_path) == (1000, 350)


def test_no_container_limit(tmp_path: Path) -> None:
    assert container_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("600\n")
    assert container_memory(tmp_path) is None


def test_this_machine_has_memory() -> None:
    memory = measure("cpu")

    assert memory.device == "cpu"
    assert 0 < memory.used_bytes < memory.total_bytes

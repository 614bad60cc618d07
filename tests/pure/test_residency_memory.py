"""What weights take at least, and what containers report."""

from __future__ import annotations

from pathlib import Path

import msgspec

from app.residency.devices import container_memory, measure
from app.residency.memory import least_weight_bytes
from store.facts import ModelFacts


def test_the_least_that_weights_take() -> None:
    """A GPU computes in half precision; the CPU keeps what is stored."""
    facts = ModelFacts(architecture="llama", num_parameters=1000, quantization="Q4_1", weight_bytes=625)

    assert least_weight_bytes(facts, "cuda:0", "auto") == 2000
    assert least_weight_bytes(facts, "cpu", "auto") == 625
    assert least_weight_bytes(facts, "cpu", "none") == 2000
    floats = msgspec.structs.replace(facts, weight_bytes=4000)
    assert least_weight_bytes(floats, "cpu", "auto") == 4000
    assert least_weight_bytes(floats, "cpu", "int8") == 1000


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

"""What weights take at least, and what this machine has."""

from __future__ import annotations

import msgspec

from app.residency.arithmetic.memory import least_weight_bytes
from app.residency.devices import measure
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


def test_this_machine_has_memory() -> None:
    memory = measure("cpu")

    assert memory.device == "cpu"
    assert 0 < memory.used_bytes < memory.total_bytes

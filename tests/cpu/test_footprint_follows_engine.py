"""The daemon's estimates use the engine's own figures, which it cannot import: it has no torch."""

from __future__ import annotations

import pytest
import torch

from app.residency.arithmetic import footprint
from app.residency.arithmetic.memory import DeviceMemory
from engine import encoder_sizing, sizing
from engine.api.config import EngineConfig
from engine.runner import device_account
from engine.runner.memory import OUTSIDE_BYTES_GUESS
from store.catalog import catalog_models
from store.catalog_facts import catalog_facts


def test_constants_are_the_same() -> None:
    assert footprint.CPU_MAX_CACHE_BYTES == sizing.CPU_MAX_CACHE_BYTES
    assert footprint.GRAPH_BYTES == sizing.GRAPH_BYTES
    assert footprint.SMALLEST_STEP_TOKENS == sizing.SMALLEST_TOKEN_BUDGET
    assert footprint.LIBRARY_BYTES == OUTSIDE_BYTES_GUESS
    assert footprint.MOST_DRIVER_BYTES == device_account.MOST_DRIVER_BYTES
    assert footprint.DRIVER_PART == device_account.DRIVER_PART
    assert footprint.ENCODER_GPU_STEP_TOKENS == encoder_sizing._GPU_STEP_TOKENS
    assert footprint.ENCODER_CPU_STEP_TOKENS == encoder_sizing._CPU_STEP_TOKENS
    assert EngineConfig(model="x").block_size == footprint.BLOCK_SIZE


def test_a_model_that_was_measured_takes_about_what_was_said() -> None:
    """Qwen3-4B on an H200, as a worker's log gave it: contexts of 16,384 tokens, 256 sequences, steps of 8,192 tokens.

    Too much by a tenth at most, and never too little.
    """
    weights, workspace, graphs, driver_and_libraries = (gib * footprint.GIB for gib in (7.49, 0.81, 0.80, 1.27))
    rounding = 2 * 36 * 2 * footprint.MIB
    facts = catalog_facts(catalog_models()["qwen3:4b"])
    h200 = DeviceMemory("cuda:0", 150_754_820_096, 0)
    found = footprint.footprint(facts, footprint.Host(h200, 0.92, max_model_len=16_384))
    measured = weights + workspace + graphs + driver_and_libraries + rounding
    assert measured <= found.fixed_bytes <= measured * 1.1
    parts = found.workspace
    for estimate, figure in (
        (parts.step, workspace),
        (parts.graphs, graphs),
        (parts.process, driver_and_libraries),
        (parts.rounding, rounding),
    ):
        assert 0.95 * figure <= estimate <= 1.2 * figure


@pytest.mark.parametrize(
    ("total_bytes", "tokens"),
    [(24 * 2**30, footprint.GPU_STEP_TOKENS), (footprint.ROOMY_GPU_BYTES, footprint.ROOMY_GPU_STEP_TOKENS)],
)
def test_steps_are_as_large(monkeypatch: pytest.MonkeyPatch, total_bytes: int, tokens: int) -> None:
    monkeypatch.setattr(sizing.devices, "total_memory_bytes", lambda _device: total_bytes)
    assert sizing._default_token_budget(torch.device("cuda:0")) == tokens
    assert sizing._default_token_budget(torch.device("cpu")) == footprint.CPU_STEP_TOKENS

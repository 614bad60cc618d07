"""The daemon's estimates use the engine's own figures, which it cannot import: it has no torch."""

from __future__ import annotations

import pytest
import torch

from app.residency import footprint
from engine import encoder_sizing, sizing
from engine.api.config import EngineConfig
from engine.runner.graph_ladder import DECODE_SIZES, PROMPT_SIZES
from engine.runner.memory import OUTSIDE_BYTES_GUESS


def test_constants_are_the_same() -> None:
    assert footprint.CPU_MAX_CACHE_BYTES == sizing.CPU_MAX_CACHE_BYTES
    assert footprint.GRAPH_BYTES == sizing.GRAPH_BYTES
    assert footprint.SMALLEST_STEP_TOKENS == sizing.SMALLEST_TOKEN_BUDGET
    assert footprint.DRIVER_BYTES == OUTSIDE_BYTES_GUESS
    assert footprint.ENCODER_GPU_STEP_TOKENS == encoder_sizing._GPU_STEP_TOKENS
    assert footprint.ENCODER_CPU_STEP_TOKENS == encoder_sizing._CPU_STEP_TOKENS
    assert EngineConfig(model="x").block_size == footprint.BLOCK_SIZE


def test_graphs_are_counted_as_they_are_captured() -> None:
    assert len(DECODE_SIZES) + len(PROMPT_SIZES) == footprint.NUM_GRAPHS
    assert sum(DECODE_SIZES) + len(PROMPT_SIZES) == footprint.NUM_GRAPH_ROWS
    assert (DECODE_SIZES[-1], PROMPT_SIZES[-1]) == (footprint.CAPTURED_SEQUENCES, footprint.CAPTURED_TOKENS)


@pytest.mark.parametrize(
    ("total_bytes", "tokens"),
    [(24 * 2**30, footprint.GPU_STEP_TOKENS), (footprint.ROOMY_GPU_BYTES, footprint.ROOMY_GPU_STEP_TOKENS)],
)
def test_steps_are_as_large(monkeypatch: pytest.MonkeyPatch, total_bytes: int, tokens: int) -> None:
    monkeypatch.setattr(sizing.devices, "total_memory_bytes", lambda _device: total_bytes)
    assert sizing._default_token_budget(torch.device("cuda:0")) == tokens
    assert sizing._default_token_budget(torch.device("cpu")) == footprint.CPU_STEP_TOKENS

"""GPU tests are collected only where torch can use an NVIDIA GPU; elsewhere the run says what it left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

LEFT_OUT = [] if torch.cuda.is_available() else sorted(path.name for path in Path(__file__).parent.glob("test_*.py"))
collect_ignore_glob = LEFT_OUT


@pytest.fixture
def alone_on_the_gpu() -> None:
    """For tests that compare the GPU's free memory, or fill it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other test processes use the GPU at the same time; run this without -n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LEFT_OUT:
        terminalreporter.write_line(
            f"Left out, because torch finds no NVIDIA GPU here: tests/gpu ({', '.join(LEFT_OUT)})"
        )

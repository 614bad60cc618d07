"""The engine is complete without what only some machines or some starts need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("module", ["engine", "engine.llm", "engine.worker"])
def test_importing_needs_no_triton(module: str) -> None:
    # None in sys.modules makes every import of the name fail.
    code = f"import sys; sys.modules['triton'] = None; import {module}; print('imported')"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert (found.returncode, found.stdout.strip()) == (0, "imported"), found.stderr


@pytest.mark.parametrize("module", ["engine.attention.compiled_paged", "engine.runner.recorded_steps"])
def test_recording_needs_no_numba(module: str) -> None:
    """It compiles what a cache does not have."""
    code = f"import sys; import {module}; print('numba' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert (found.returncode, found.stdout.strip()) == (0, "False"), found.stderr

"""What importing must not cost."""

from __future__ import annotations

import subprocess
import sys

import pytest


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize("heavy", ["torch", "transformers", "textual"])
def test_the_daemon_loads_no_engine_libraries(heavy: str) -> None:
    assert heavy not in modules_after("import app.server")


def test_settings_load_no_web_framework() -> None:
    assert not {"litestar", "uvicorn", "zmq"} & modules_after("import app.settings")

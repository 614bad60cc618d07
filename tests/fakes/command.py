"""The command `quire` as a process that finds the daemon of a test."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.fakes.daemon import FakeDaemon


def environment(daemon: FakeDaemon) -> dict[str, str]:
    """That of a shell in which this daemon is the user's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "HF_"))}
    return {
        **kept,
        "QUIRE_STATE_DIR": str(daemon.state_dir),
        "QUIRE_CONFIG_DIR": str(daemon.state_dir.parent / "config"),
        "QUIRE_HOME": str(daemon.data_root),
        "HTTP_PROXY": "http://127.0.0.1:9",
    }


def quire(daemon: FakeDaemon, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "app.cli", *arguments],
        env=environment(daemon),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def start_quire(daemon: FakeDaemon, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "app.cli", *arguments],
        env=environment(daemon),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

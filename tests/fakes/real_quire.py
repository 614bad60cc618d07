"""The command `quire` and its daemon as they are, with directories of their own; nothing is faked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil


class Quire:
    """The `quire` command with directories of its own and the models of the test cache."""

    def __init__(self, directory: Path, data_root: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "HF_"))}
        self.state_dir = directory / "state"
        self.environment = {
            **kept,
            "QUIRE_CONFIG_DIR": str(directory / "config"),
            "QUIRE_STATE_DIR": str(self.state_dir),
            "QUIRE_HOME": str(data_root),
            "QUIRE_PORT": "0",
        }

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "app.cli", *arguments],
            env={**self.environment, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **environment)
        stdout, stderr = process.communicate(stdin, timeout=120)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def daemon(self) -> psutil.Process:
        record = json.loads((self.state_dir / "daemon.json").read_text())
        return psutil.Process(record["pid"])

    def base_url(self) -> str:
        record = json.loads((self.state_dir / "daemon.json").read_text())
        return f"http://127.0.0.1:{record['port']}"

    def worker(self) -> psutil.Process:
        (worker,) = self.daemon().children()
        return worker

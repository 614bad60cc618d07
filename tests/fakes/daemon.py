"""The real daemon with fake workers: run as a script, it serves until it is told to stop.

Environment: QUIRE_* as for the real one; QUIRE_TEST_MEMORY_BYTES, the memory that the machine
seems to have; QUIRE_TEST_REAL_WORKERS, which gives it workers with engines in such a machine.
`running_daemon` starts it on a free port and waits for it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import msgspec

REPOSITORY = Path(__file__).parents[2]


@dataclass
class FakeDaemon:
    """A daemon process under test."""

    process: subprocess.Popen[bytes]
    port: int
    state_dir: Path
    data_root: Path
    log: Path

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log_text(self) -> str:
        return self.log.read_text()


@contextmanager
def running_daemon(directory: Path, **environment: str) -> Iterator[FakeDaemon]:
    """Start a daemon that lives in `directory`; ends it with SIGTERM."""
    process, log = start_process(directory, **environment)
    try:
        yield _wait_until_ready(directory, process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        finally:
            process.kill()


def start_process(directory: Path, **environment: str) -> tuple[subprocess.Popen[bytes], Path]:
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "stderr.log"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "HF_"))}
    variables = {
        "QUIRE_CONFIG_DIR": str(directory / "config"),
        "QUIRE_STATE_DIR": str(directory / "state"),
        "QUIRE_HOME": str(directory / "data"),
        "QUIRE_PORT": "0",
        "PYTHONPATH": str(REPOSITORY),
        **environment,
    }
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__))], env={**kept, **variables}, stdout=output, stderr=output
        )
    return process, log


async def eventually(check: Callable[[], Awaitable[bool]], *, within_s: float = 10.0) -> None:
    """Poll until `check` is true."""
    deadline = time.monotonic() + within_s
    while not await check():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.02)


def _wait_until_ready(directory: Path, process: subprocess.Popen[bytes], log: Path) -> FakeDaemon:
    record = directory / "state" / "daemon.json"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        if record.exists():
            port = msgspec.json.decode(record.read_bytes())["port"]
            try:
                httpx.get(f"http://127.0.0.1:{port}/version", trust_env=False)
            except httpx.TransportError:
                pass
            else:
                return FakeDaemon(process, port, directory / "state", directory / "data", log)
        time.sleep(0.02)
    raise AssertionError(f"the daemon did not start:\n{log.read_text()}")


def main() -> None:
    from app.errors import AppError
    from app.residency.arithmetic.memory import DeviceMemory
    from app.server import WORKER_COMMAND, real_parts, serve
    from app.settings import load_settings
    from store.errors import StoreError

    total_bytes = int(os.environ.get("QUIRE_TEST_MEMORY_BYTES", str(2**40)))
    fake_workers = (sys.executable, str(Path(__file__).with_name("worker.py")))
    try:
        settings = load_settings()
        parts = replace(
            real_parts(settings),
            worker_command=WORKER_COMMAND if "QUIRE_TEST_REAL_WORKERS" in os.environ else fake_workers,
            measure_devices=lambda device: (DeviceMemory("cpu", total_bytes, 0),),
        )
        serve(settings, parts)
    except (AppError, StoreError) as error:
        sys.exit(f"Error: {error.message}")


if __name__ == "__main__":
    main()

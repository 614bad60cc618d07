"""Where compiled kernels are kept between starts: under the data root, apart for each device and version.

Sets the variables that Triton and the CUDA driver read; called once while an engine is built for a
GPU, before the first kernel is compiled.  Knows no kernel.  A cache that cannot be written costs
time at the next start, never the engine.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import logging
import os
import re
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_LEAST_FREE_BYTES = 256 * 2**20


def use_kernel_cache(
    directory: Path | None, device: torch.device, environ: MutableMapping[str, str] = os.environ
) -> Path | None:
    """Let libraries keep compiled kernels under `directory`; None means the data root's own.

    Returns the folder of this device and these library versions, where other small things that are
    worth keeping may go too; None where there is no place to write at all.  Where the directory cannot
    be written, or its disk is full, one warning is logged and kernels go to a temporary directory.
    With `directory` None, variables that are set already are left alone.
    """
    root = directory or _default_directory()
    if root is None:
        return None
    folder = root / cache_key(_device_name(device), _triton_version(), torch.__version__)
    if not _is_usable(folder, root):
        temporary = _temporary_directory()
        if temporary is None:
            return None
        root = folder = temporary
    for name, path in (("TRITON_CACHE_DIR", folder / "triton"), ("CUDA_CACHE_PATH", root / "cuda")):
        if directory is not None or name not in environ:
            environ[name] = str(path)
    return folder


def cpu_cache_folder(directory: Path | None) -> Path | None:
    """Where an engine on the CPU may keep compiled kernels and packed weights: under `directory`, None means the
    data root's own.  None where there is no place to write, which is logged."""
    root = directory or _default_directory()
    if root is None:
        return None
    folder = root / "cpu"
    return folder if _is_usable(folder, root) else None


def cache_key(device_name: str, triton_version: str, torch_version: str) -> str:
    """The name of a folder: what makes compiled kernels useless elsewhere."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", f"{device_name}-triton-{triton_version}-torch-{torch_version}")


def _default_directory() -> Path | None:
    """The data root of this user; None where the package that knows it is not installed."""
    try:
        from store.paths import DataRoot
    except ImportError:
        return None
    return DataRoot(DataRoot.default_path()).kernels


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _triton_version() -> str:
    """From the package's metadata: importing it would read the variables that are still to be set."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _is_usable(folder: Path, root: Path) -> bool:
    reason = _why_unusable(folder)
    if reason is not None:
        log.warning("The kernel cache %s cannot be used (%s); kernels are compiled again at every start.", root, reason)
    return reason is None


def _why_unusable(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permission bits and mount flags lie.
        with tempfile.TemporaryFile(dir=folder):
            free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return (error.strerror or type(error).__name__).lower()
    return "the disk is full" if free_bytes < _LEAST_FREE_BYTES else None


def _temporary_directory() -> Path | None:
    try:
        folder = tempfile.mkdtemp(prefix="quire-kernels-")
    except OSError:
        return None
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)

"""The only module that decides where files live.

Two places: `UserPaths`, small files on the home disk (settings, daemon address, locks, database),
and `DataRoot`, everything large (weights, partial downloads, compiled kernels, logs) on a disk the
user chose.  Knows nothing of what the files contain; `app`, `engine` launchers and the rest of
`store` ask here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import platformdirs

from store.errors import DataRootUnusable
from store.known_roots import (
    MARKER_NAME,
    KnownRoot,
    ensure_marker,
    known_root,
    mount_of,
    read_marker,
    reason_missing,
    remember_root,
)

APP_NAME = "quire"
CONFIG_NAME = "config.toml"
MOVE_JOURNAL_NAME = ".quire-move.json"
"""In a data root that a move fills or has filled; see `store.disk.relocate`."""
_PROBE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class UserPaths:
    """Directories for small files, private to the user."""

    config_dir: Path
    state_dir: Path
    runtime_dir: Path
    data_dir: Path

    @property
    def database(self) -> Path:
        """Chats and usage; on the home disk, so that they stay when the disk of the models is away."""
        return self.data_dir / "quire.db"


def user_paths() -> UserPaths:
    """The user's directories, created with mode 0700.

    `QUIRE_CONFIG_DIR` replaces the first; `QUIRE_STATE_DIR` the other three, so that a second
    instance or a test stays apart from the first.  Raises DataRootUnusable.
    """
    dirs = platformdirs.PlatformDirs(APP_NAME, appauthor=False)
    config = os.environ.get("QUIRE_CONFIG_DIR")
    state = os.environ.get("QUIRE_STATE_DIR")
    state_dir = Path(state).expanduser().absolute() if state else dirs.user_state_path
    paths = UserPaths(
        config_dir=Path(config).expanduser().absolute() if config else dirs.user_config_path,
        state_dir=state_dir,
        runtime_dir=state_dir / "run" if state else _session_runtime_path() or state_dir / "run",
        data_dir=state_dir / "data" if state else dirs.user_data_path,
    )
    for path in (paths.config_dir, paths.state_dir, paths.runtime_dir, paths.data_dir):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DataRootUnusable(
                f"The directory {path} cannot be created ({_reason(error)}); set QUIRE_CONFIG_DIR and "
                "QUIRE_STATE_DIR to directories you can write."
            ) from error
    return paths


def _session_runtime_path() -> Path | None:
    """The login session's directory for sockets, where there is one.

    platformdirs would fall back to a shared temporary directory, with a warning on every command.
    """
    directory = os.environ.get("XDG_RUNTIME_DIR")
    return Path(directory, APP_NAME) if directory and os.access(directory, os.W_OK) else None


@dataclass(frozen=True, slots=True)
class DataRoot:
    """The directory that holds everything large; `DataRoot.open` proves that it can be used."""

    root: Path

    @classmethod
    def default_path(cls) -> Path:
        """`QUIRE_HOME`, else `data_root` of config.toml, else the platform's user data directory.

        For callers without `app.settings`, which reads the same places.  Raises DataRootUnusable.
        """
        chosen = os.environ.get("QUIRE_HOME") or _configured_path()
        return Path(chosen).expanduser().absolute() if chosen else platform_data_root()

    @classmethod
    def open(cls, path: Path | str | None = None, *, renew: bool = False) -> Self:
        """Create the data root where needed, prove that it takes a write, and remember it.

        Only the last level is created: a missing parent usually is a disk that is not mounted, and
        creating it would fill the system disk instead.  A root that was used before and is gone is
        created again only with `renew`, and only if its disk is mounted.  Raises DataRootUnusable.
        """
        root = Path(path).expanduser().absolute() if path is not None else cls.default_path()
        try:
            _require_present(root, renew=renew)
            root.mkdir(parents=root == platform_data_root(), exist_ok=True)
            opened = cls(root)
            for folder in opened.folders:
                folder.mkdir(exist_ok=True)
            _prove_writable(opened.downloads)
            root_id = ensure_marker(root)
        except OSError as error:
            raise _unusable(root, error) from error
        _remember(KnownRoot(str(root), root_id, str(mount_of(root))))
        return opened

    @classmethod
    def look(cls, path: Path) -> Self:
        """The data root for reading: nothing is created, and it may not exist yet.

        Raises DataRootUnusable for one that was used before and is gone.
        """
        try:
            _require_present(path, renew=False)
        except OSError as error:
            raise _unusable(path, error) from error
        return cls(path)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the root from being moved away meanwhile.  Raises DataRootUnusable while it is being moved."""
        with root_lock(self.root, fcntl.LOCK_SH) as is_held:
            if not is_held:
                raise DataRootUnusable(
                    f"The data root {self.root} is being moved; wait for `quire disk move`, or end it with Ctrl-C."
                )
            yield

    @property
    def folders(self) -> tuple[Path, ...]:
        """Everything large, and all that a move takes along beside `external_list`."""
        return (self.hub, self.presets, self.downloads, self.kernels, self.logs)

    @property
    def hub(self) -> Path:
        """Weights, in the Hugging Face cache layout."""
        return self.root / "hub"

    @property
    def presets(self) -> Path:
        """What was made here of models whose files lie elsewhere; small."""
        return self.root / "presets"

    @property
    def downloads(self) -> Path:
        """Partial downloads and the locks of pulls; on the same file system as `hub`."""
        return self.root / "downloads"

    @property
    def kernels(self) -> Path:
        """Compiled kernels of every library that compiles some."""
        return self.root / "kernels"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def marker(self) -> Path:
        """Makes the directory a data root; holds its id, and is what locks are on."""
        return self.root / MARKER_NAME

    @property
    def external_list(self) -> Path:
        """Which folders of others are read too; see `store.external`."""
        return self.root / "external.json"

    def library_environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Variables for child processes so that no library writes anything large elsewhere.

        They must be set before the libraries are imported: most read them only then.  The stored
        hub login keeps its place although `HF_HOME` moves.  Xet is off because it ignores mirrors.
        """
        return {
            "HF_HOME": str(self.root),
            "HF_HUB_CACHE": str(self.hub),
            "HF_XET_CACHE": str(self.downloads / "xet"),
            "HF_TOKEN_PATH": str(hub_token_path(environ)),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TRITON_CACHE_DIR": str(self.kernels / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.kernels / "inductor"),
            "TORCH_EXTENSIONS_DIR": str(self.kernels / "extensions"),
            "TORCH_HOME": str(self.kernels / "torch"),
            "CUDA_CACHE_PATH": str(self.kernels / "cuda"),
        }


def hub_token_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `hf auth login` keeps the token: the rule of huggingface_hub, without importing it."""
    if explicit := environ.get("HF_TOKEN_PATH"):
        return Path(explicit).expanduser()
    cache_home = environ.get("XDG_CACHE_HOME") or "~/.cache"
    hub_home = environ.get("HF_HOME") or f"{cache_home}/huggingface"
    return Path(hub_home).expanduser() / "token"


def platform_data_root() -> Path:
    """The data root of someone who chose none."""
    return platformdirs.user_data_path(APP_NAME, appauthor=False)


@contextmanager
def root_lock(root: Path, kind: int) -> Iterator[bool]:
    """Hold the data root's lock, shared (LOCK_SH) to use it or alone (LOCK_EX) to move it; yields whether it is held.

    The kernel drops it when a process dies.  File systems that know no locks count as held.
    """
    try:
        descriptor = os.open(root / MARKER_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # Without a marker nobody can use it.
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            is_held = True
        except BlockingIOError:
            is_held = False
        except OSError:
            is_held = True
        yield is_held
    finally:
        os.close(descriptor)


def _configured_path() -> str | None:
    try:
        file = user_paths().config_dir / CONFIG_NAME
    except DataRootUnusable:
        # Without directories of the user's own there is no config either.
        return None
    try:
        value = tomllib.loads(file.read_text(encoding="utf-8")).get("data_root")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataRootUnusable(f"The config file {file} cannot be read ({error}); correct it or remove it.") from error
    return str(value) if value else None


def _require_present(root: Path, *, renew: bool) -> None:
    """Raise DataRootUnusable for a root that was used before and is gone, or that a move has not filled yet."""
    if read_marker(root) is not None:
        return
    if (root / MOVE_JOURNAL_NAME).is_file():
        raise DataRootUnusable(f"{root} is the unfinished copy of a move; `quire disk move {root}` goes on with it.")
    state_dir = _state_dir()
    known = known_root(state_dir, root) if state_dir else None
    # The home disk is always there: whoever deletes the platform's directory wants an empty one.
    if known is None or (root == platform_data_root() and known.moved_to is None):
        return
    if not (renew and os.path.ismount(known.mount)):
        raise DataRootUnusable(reason_missing(known))


def _remember(known: KnownRoot) -> None:
    if state_dir := _state_dir():
        # A home directory that takes no write must not keep models from running; nor a path that is no UTF-8.
        with suppress(OSError, UnicodeEncodeError):
            remember_root(state_dir, known)


def _state_dir() -> Path | None:
    """Where roots are remembered; None where the user's directories cannot be made."""
    try:
        return user_paths().state_dir
    except DataRootUnusable:
        return None


def _unusable(root: Path, error: OSError) -> DataRootUnusable:
    return DataRootUnusable(f"The data root {root} cannot be used: {_reason(error)}; {_next_step(error)}.")


def _prove_writable(directory: Path) -> None:
    """Write, flush and remove a file: permission bits and mount flags lie, and a full disk fails only here."""
    probe = directory / f".probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(b"\0" * _PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def _next_step(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space there, or take another disk with `quire disk use PATH` or QUIRE_HOME"
    if isinstance(error, FileNotFoundError):
        return "mount its disk or create its parent directory, or take another with `quire disk use PATH` or QUIRE_HOME"
    return "make it writable for this user, or take another with `quire disk use PATH` or QUIRE_HOME"

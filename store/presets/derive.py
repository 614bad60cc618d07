"""Further names for models that are here: copies, and presets on top of them.  No file is copied.

A new name is one more manifest of the same files, which stay as long as one name needs them.  Knows
neither Modelfiles nor what the engine accepts; called by `app.creation` and `quire cp`.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import msgspec

from store import catalog
from store.errors import BrokenFile, InvalidName, ModelNotFound, NameTaken
from store.locks import repo_lock_now
from store.models import InstalledModel, Manifest, ModelStore
from store.names import RepoId, parse_model_name
from store.presets.preset import Preset


def copy_model(store: ModelStore, source: str, name: str) -> InstalledModel:
    """Give an installed model another name.

    Raises NameTaken if there is such a model already, ModelNotFound, BrokenFile, InvalidName or ModelBusy.
    """
    new_name = check_new_name(name)
    manifest = _manifest_of(store, source)
    if _is_taken(store, new_name):
        raise NameTaken(f"There is a model {new_name} already; `quire rm {new_name}` removes it.")
    return _register(
        store,
        msgspec.structs.replace(manifest, name=new_name, source="copy", base=manifest.base or manifest.name),
    )


def create_model(store: ModelStore, base: str, name: str, preset: Preset) -> InstalledModel:
    """Put `preset` on top of an installed model, or of a path, and give that a name.

    Replaces an earlier creation or copy of this name, and raises NameTaken for anything else that has it;
    errors otherwise as `copy_model`.
    """
    new_name = check_new_name(name)
    manifest = _manifest_of(store, base)
    before = [found for found in store.matching(parse_model_name(new_name)) if found[1].name == new_name]
    if _is_taken(store, new_name) and not any(earlier.base for _, earlier in before):
        raise NameTaken(f"{new_name} is a model that was not made here; choose another name.")
    created = msgspec.structs.replace(
        manifest, name=new_name, source="created", base=manifest.name, preset=preset.over(manifest.preset)
    )
    model = _register(store, created)
    for path, _ in before:
        if path != store.manifest_path(created):
            path.unlink(missing_ok=True)
    return model


def check_new_name(name: str) -> str:
    """`name` as a name that a model may be given here.  Raises InvalidName."""
    parsed = parse_model_name(name)
    if parsed.kind != "alias":
        raise InvalidName(f"{parsed.text} cannot be given to a model; use a short name such as mine or mine:v2.")
    if parsed.text in catalog.catalog_models():
        raise InvalidName(f"{parsed.text} is a name of the catalogue; choose another one, such as my-{parsed.text}.")
    return parsed.text


def _is_taken(store: ModelStore, name: str) -> bool:
    try:
        store.find(name)
    except (ModelNotFound, BrokenFile):
        # A damaged model keeps its name.
        return any(manifest.name == name for _, manifest in store.matching(parse_model_name(name)))
    return True


def _manifest_of(store: ModelStore, name: str) -> Manifest:
    """The manifest of an installed model, or one for files that have none: a path, a registered folder."""
    model = store.find(name)
    for _, manifest in store.matching(parse_model_name(name)):
        if manifest.name == model.name:
            return manifest
    return Manifest(
        name=model.name,
        reference=model.name,
        repo="",
        commit="",
        source=model.source,
        files=(),
        entry=None,
        modified_at=model.modified_at,
        path=str(model.path),
    )


def _register(store: ModelStore, manifest: Manifest) -> InstalledModel:
    # It stands for itself alone: the name of its repository must not lead to somebody's preset.
    own = msgspec.structs.replace(manifest, reference=manifest.name, modified_at=time.time())
    with repo_lock_now(store.root, RepoId(own.repo)) if own.path is None else nullcontext():
        return store.register(own)

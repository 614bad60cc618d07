"""The commands that keep installed models sound, without a daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli import main
from store.models import ModelStore
from store.paths import DataRoot
from tests.fakes.installed import install


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelStore:
    for name in ("QUIRE_CONFIG_DIR", "QUIRE_STATE_DIR", "QUIRE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("QUIRE_HOST", "QUIRE_PORT", "QUIRE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return ModelStore(DataRoot.open(tmp_path / "QUIRE_HOME"))


def quire(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


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

"""Nothing faked but the hub: where a pull, a chat, a move and a borrowed model leave their bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.models import InstalledModel
from tests.fakes.hub import FakeHub

REPOSITORY = Path(__file__).parents[2]
QUESTION = "What is the capital of Japan?"
MOST_BYTES_ELSEWHERE = 3_000_000
NAME = "org/starter:starter.gguf"


class Home:
    """A user with a small home directory and a large disk beside it, which config.toml names."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.large = directory / "large"
        self.data_root = self.large / "quire"
        self.home = directory / "home"
        for folder in (".config/quire", ".local/state", ".local/share"):
            (self.home / folder).mkdir(parents=True)
        for folder in ("large", "tmp", "work"):
            (directory / folder).mkdir()
        (self.home / ".config/quire/config.toml").write_text(f"port = 0\ndata_root = '{self.data_root}'\n")
        if os.geteuid() != 0:
            self.home.chmod(0o500)

    def quire(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("QUIRE_", "HF_", "XDG_", "TORCH", "TRITON_CACHE"))
        }
        variables = {"HOME": str(self.home), "TMPDIR": str(self.directory / "tmp"), "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(
            [sys.executable, "-P", "-m", "app.cli", *arguments],
            env={**kept, **variables, **environment},
            cwd=self.directory / "work",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    def keep_compiled_kernels(self) -> None:
        """Put what other tests compiled where this user's engine keeps it: compiling again takes a minute."""
        for entry in Path(os.environ["QUIRE_CODE_CACHE"]).glob("*/*"):
            # Beside them the test cache has packed weights of its own.
            if entry.is_file() and entry.parent.name != "cpu":
                copy = self.data_root / "kernels/cpu" / entry.parent.name / entry.name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(entry, copy)

    def bytes_elsewhere(self) -> dict[str, int]:
        """Sizes of all files outside the large disk."""
        files = (path for path in self.directory.rglob("*") if path.is_file() and not path.is_relative_to(self.large))
        return {str(path): path.stat().st_size for path in files}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    home.quire("shutdown")
    home.home.chmod(0o700)


def size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def test_a_pull_and_a_chat_leave_nothing_large_outside_the_data_root(home: Home, starter: InstalledModel) -> None:
    home.keep_compiled_kernels()
    with FakeHub() as hub:
        hub.add("org/starter", {"starter.gguf": starter.path.read_bytes()})
        pulled = home.quire("pull", f"hf.co/{NAME}", HF_ENDPOINT=hub.endpoint)
        assert pulled.returncode == 0, pulled.stderr
    answer = home.quire("run", NAME, QUESTION, "--temperature", "0")
    assert "Tokyo" in answer.stdout, answer.stderr
    home.quire("shutdown")

    elsewhere = home.bytes_elsewhere()
    assert sum(elsewhere.values()) < MOST_BYTES_ELSEWHERE, elsewhere
    assert size_of(home.data_root / "hub") > starter.size_bytes
    assert size_of(home.data_root / "kernels") > starter.size_bytes // 2, "packed weights are kept there too"
    assert any((home.data_root / "logs").iterdir())


def test_a_borrowed_model_is_used_in_place_and_everything_moves_under_a_daemon(
    home: Home, starter: InstalledModel, starter_root: Path
) -> None:
    kernels = {"QUIRE_CODE_CACHE": os.environ["QUIRE_CODE_CACHE"]}
    theirs = starter_root / "hub"
    before = {path: path.lstat().st_mtime_ns for path in theirs.rglob("*")}
    added = home.quire("disk", "add", str(theirs))
    assert added.returncode == 0, added.stderr
    answer = home.quire("run", "starter", QUESTION, "--temperature", "0", **kernels)
    assert "Tokyo" in answer.stdout, answer.stderr
    assert "pulling" not in answer.stderr
    assert {model["source"] for model in json.loads(home.quire("list", "--json").stdout)["models"]} == {"external"}

    target = home.large / "moved"
    refused = home.quire("disk", "move", str(target))
    assert (refused.returncode, "quire shutdown" in refused.stderr) == (1, True), refused.stderr
    moved = home.quire("disk", "move", str(target), "--yes")
    assert moved.returncode == 0, moved.stderr
    assert not home.data_root.exists()
    num_packed = len(list(target.rglob("*.safetensors")))
    again = home.quire("run", "starter", QUESTION, "--temperature", "0", **kernels)
    assert again.stdout == answer.stdout, again.stderr
    assert f"its log is {target}" in again.stderr
    assert len(list(target.rglob("*.safetensors"))) == num_packed
    assert size_of(target / "hub") == 0
    assert {path: path.lstat().st_mtime_ns for path in theirs.rglob("*")} == before

"""`quire create` against the real daemon: what a Modelfile says is what a request gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.daemon import FakeDaemon, running_daemon
from tests.fakes.hub import FakeHub
from tests.fakes.tiny_model import write_tiny_model

MODELFILE = '''
FROM ./tiny
TEMPLATE """{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"""
SYSTEM Rhyme.
MESSAGE user 1
MESSAGE assistant 2
PARAMETER stop "Z"
PARAMETER num_ctx 100
'''


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with running_daemon(tmp_path) as daemon:
        yield daemon


def quire(daemon: FakeDaemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "HF_"))}
    directories = {
        "QUIRE_STATE_DIR": str(daemon.state_dir),
        "QUIRE_CONFIG_DIR": str(daemon.state_dir.parent / "config"),
        "QUIRE_HOME": str(daemon.data_root),
    }
    return subprocess.run(
        [sys.executable, "-P", "-m", "app.cli", *arguments],
        env={**kept, **directories},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def answer(daemon: FakeDaemon, messages: list[dict[str, str]], **params: Any) -> str:
    body = {"model": "poet", "messages": messages, **params}
    response = httpx.post(f"{daemon.base_url}/v1/chat/completions", json=body, trust_env=False, timeout=30)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_a_model_of_ones_own(daemon: FakeDaemon, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text(MODELFILE)
    created = quire(daemon, "create", "poet", "-f", str(modelfile), "--json")
    assert created.returncode == 0, created.stderr
    assert json.loads(created.stdout)["base"] == str(tmp_path / "tiny")

    asked = [{"role": "user", "content": "3"}]
    assert answer(daemon, asked) == "s:Rhyme.|u:1|a:2|u:3|"
    own_system = [{"role": "system", "content": "Do not."}, *asked]
    assert answer(daemon, own_system) == "s:Do not.|u:1|a:2|u:3|"
    assert answer(daemon, [{"role": "user", "content": "to Z"}]) == "s:Rhyme.|u:1|a:2|u:to "
    assert answer(daemon, [{"role": "user", "content": "to Z"}], stop=[]) == "s:Rhyme.|u:1|a:2|u:to Z|"
    assert quire(daemon, "run", "poet", "4").stdout == "s:Rhyme.|u:1|a:2|u:4|\n"

    refused = quire(daemon, "rm", "poet")
    assert refused.returncode == 1
    assert "quire rm --force" in refused.stderr

    printed = quire(daemon, "show", "poet", "--modelfile").stdout
    modelfile.write_text(printed.replace("Rhyme.", "Shout."))
    assert quire(daemon, "create", "poet", "-f", str(modelfile)).returncode == 0
    assert answer(daemon, asked) == "s:Shout.|u:1|a:2|u:3|", "the daemon lets go of the model of before"

    removed = quire(daemon, "rm", "poet", "--force", "--json")
    assert (removed.returncode, json.loads(removed.stdout)["models"][0]["freed_bytes"]) == (0, 0)
    assert (tmp_path / "tiny" / "config.json").exists()


def test_what_a_chat_could_not_do_is_refused_at_once(daemon: FakeDaemon, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    modelfile = tmp_path / "Modelfile"
    for text, complaint in (
        ("PARAMETER repeat_penalty -1", "repeat_penalty"),
        ("PARAMETER num_ctx 999999999", "num_ctx"),
        ("TEMPLATE {% if %}", "TEMPLATE"),
        ("SYSTEM hi\nTEMPLATE {{ raise_exception('no system role') }}", "no system role"),
        ("PARAMETER num_gpu 1", "Line 2"),
    ):
        modelfile.write_text(f"FROM ./tiny\n{text}\n")
        done = quire(daemon, "create", "poet", "-f", str(modelfile))
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert complaint in done.stderr
    assert "--file" in quire(daemon, "create", "--help").stdout
    missing = quire(daemon, "create", "poet", "-f", str(tmp_path / "nowhere"))
    assert (missing.returncode, "There is no Modelfile at" in missing.stderr) == (1, True)


def test_models_of_the_same_files_share_a_worker(daemon: FakeDaemon, tmp_path: Path) -> None:
    base = str(write_tiny_model(tmp_path / "tiny"))
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text("FROM ./tiny\nSYSTEM Rhyme.\nTEMPLATE {{ messages[0].content }}{{ messages[-1].content }}\n")
    assert quire(daemon, "create", "poet", "-f", str(modelfile)).returncode == 0
    modelfile.write_text("FROM ./tiny\nPARAMETER num_ctx 100\n")
    assert quire(daemon, "create", "short", "-f", str(modelfile)).returncode == 0

    assert quire(daemon, "run", base, "1").stdout == "1\n"
    assert quire(daemon, "run", "poet", "2").stdout == "Rhyme.2\n"
    assert quire(daemon, "run", "short", "3").stdout == "3\n"
    assert quire(daemon, "run", base, "4").stdout == "4\n"
    running = {entry["name"]: entry for entry in json.loads(quire(daemon, "ps", "--json").stdout)["models"]}
    assert running.keys() == {base, "poet", "short"}
    assert running["poet"]["pid"] == running[base]["pid"] != running["short"]["pid"]
    assert (running["poet"]["size"], running[base]["size"] > 0) == (0, True)

    assert quire(daemon, "stop", base).stderr == f"Unloaded {base}.\n"
    assert quire(daemon, "run", "poet", "5").stdout == "Rhyme.5\n"
    (poet,) = [e for e in json.loads(quire(daemon, "ps", "--json").stdout)["models"] if e["name"] == "poet"]
    assert (poet["pid"], poet["size"] > 0) == (running[base]["pid"], True)
    assert quire(daemon, "stop", "--all").returncode == 0
    assert json.loads(quire(daemon, "ps", "--json").stdout)["models"] == []


def test_a_base_that_is_not_installed_is_pulled_first(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")
    with FakeHub() as hub:
        hub.add("org/tiny", {file.name: file.read_bytes() for file in source.iterdir()})
        with running_daemon(tmp_path / "daemon", HF_ENDPOINT=hub.endpoint) as daemon:
            modelfile = tmp_path / "Modelfile"
            modelfile.write_text("FROM org/tiny\nPARAMETER stop Z\n")
            created = quire(daemon, "create", "poet", "-f", str(modelfile))
            assert created.returncode == 0, created.stderr
            assert answer(daemon, [{"role": "user", "content": "to Z"}]) == "to "
            removed = quire(daemon, "rm", "org/tiny")
            assert "stay for poet" in removed.stderr

"""`quire pull --dry-run`, its other options, and `quire login`, against a hub on loopback."""

from __future__ import annotations

import io
import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli import main
from app.cli.failure import CommandFailure
from app.cli.pull import parse_rate
from tests.fakes.http_daemon import HttpDaemon
from tests.fakes.hub import COMMIT, FakeHub, unused_endpoint

FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": bytes(5000)}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add("org/repo", dict(FILES))
        yield hub


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CONFIG_DIR", "STATE_DIR", "HOME"):
        monkeypatch.setenv(f"QUIRE_{name}", str(tmp_path / name.lower()))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "hf/token"))
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE", "QUIRE_HUB_MIRRORS", "MODELSCOPE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> HttpDaemon:
    daemon = HttpDaemon(installed=set())
    for name in ("pull.open_client", "run.open_client"):
        monkeypatch.setattr(f"app.cli.{name}", daemon.client)
    return daemon


def quire(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_dry_run_fetches_and_writes_nothing(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    assert quire("pull", "--dry-run", "org/repo") == 0
    printed = capsys.readouterr()
    assert [line.split() for line in printed.out.splitlines()] == [
        ["FILE", "SIZE", "TO", "FETCH"],
        ["config.json", "2", "B", "2", "B"],
        ["tokenizer.json", "2", "B", "2", "B"],
        ["model.safetensors", "5", "kB", "5", "kB"],
    ]
    assert f"org/repo at main ({COMMIT[:12]}) from {hub.endpoint}" in printed.err
    assert "5 kB to fetch of 5 kB" in printed.err
    assert hub.file_requests() == []
    assert not (home / "home").exists()


def test_a_dry_run_as_json(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    assert quire("pull", "--dry-run", "--json", "org/repo") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["name"], plan["commit"], plan["needed"], plan["endpoints"]) == (
        "org/repo", COMMIT, 5004, [hub.endpoint],
    )  # fmt: skip
    assert [(file["path"], file["size"], file["present"]) for file in plan["files"]] == [
        ("config.json", 2, False), ("tokenizer.json", 2, False), ("model.safetensors", 5000, False),
    ]  # fmt: skip


def test_a_dry_run_fails_when_the_disk_is_too_small(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr("store.plan.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    assert quire("pull", "--dry-run", "org/repo") == 1
    assert "org/repo needs 5 kB more" in capsys.readouterr().err


def test_offline_asks_nobody(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    assert quire("pull", "--dry-run", "--offline", "org/repo") == 1
    assert "offline mode is on; leave out --offline" in capsys.readouterr().err
    assert hub.requests == []


def test_options_of_a_pull_reach_the_daemon(daemon: HttpDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quire("pull", "--limit-rate", "1.5M", "org/repo") == 0
    assert quire("pull", "--offline", "org/repo") == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert quire("run", "--offline", "m", "hello") == 0
    assert [body for path, body in daemon.requests if path == "/api/pull"] == [
        {"model": "org/repo", "limit_bytes_per_s": 1_500_000},
        {"model": "org/repo", "offline": True},
        {"model": "m", "offline": True},
    ]


@pytest.mark.parametrize(
    ("text", "rate"), [("10M", 10_000_000), ("500k", 500_000), ("1.5 MB/s", 1_500_000), ("2g", 2 * 10**9), ("7", 7)]
)
def test_rates(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "0", "-1M", "M", "10 apples", "0.0001", "1e9", "10MiB"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(CommandFailure, match="is not a rate"):
        parse_rate(text)


def test_login_checks_the_token_and_keeps_it_private(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    hub.faults.required_token = "hf_right"
    token_file = home / "hf/token"
    assert quire("login", "--token", "hf_wrong") == 1
    assert not token_file.exists()
    monkeypatch.setattr(sys, "stdin", io.StringIO("hf_right\n"))
    assert quire("login") == 0
    assert token_file.read_text() == "hf_right"
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    assert f"You are somebody at {hub.endpoint}." in capsys.readouterr().err
    hub.repos["org/repo"].gated = True
    assert quire("pull", "--dry-run", "org/repo") == 0
    assert hub.requests[-1].authorization == "Bearer hf_right"
    assert quire("logout") == 0
    assert not token_file.exists()
    assert quire("logout") == 0
    assert "No token" in capsys.readouterr().err


def test_a_login_without_a_network_is_kept_unchecked(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", unused_endpoint())
    assert quire("login", "--token", "hf_x") == 0
    assert "The token was not checked" in capsys.readouterr().err
    assert (home / "hf/token").read_text() == "hf_x"


def test_the_token_of_a_mirror_goes_to_the_mirror_alone(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeHub() as mirror:
        mirror.add("org/repo", dict(FILES))
        mirror.faults.required_token = "for-the-mirror"
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("QUIRE_HUB_MIRRORS", mirror.endpoint)
        assert quire("login", "--host", mirror.endpoint, "--token", "for-the-mirror") == 0
        assert not (home / "hf/token").exists()
        assert quire("pull", "--dry-run", "org/repo") == 0
        assert {seen.authorization for seen in hub.requests} == {None}
        assert {seen.authorization for seen in mirror.requests} == {"Bearer for-the-mirror"}
    tokens = home / "config_dir/hub_tokens.json"
    assert stat.S_IMODE(tokens.stat().st_mode) == 0o600
    assert quire("logout", "--host", mirror.endpoint) == 0
    assert json.loads(tokens.read_text()) == {}


@pytest.mark.parametrize("token", [" ", "two words", "naïve", "a\x07b"])
def test_what_is_no_token(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("login", "--token", token, "--host", "http://127.0.0.1:9") == 2
    assert "That is not a token" in capsys.readouterr().err

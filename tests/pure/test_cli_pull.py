"""`quire pull --dry-run`, its other options, and `quire login`, against a hub on loopback."""

from __future__ import annotations

import io
import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.cli.failure import CommandFailure
from app.cli.pull import parse_rate
from app.job_journal import JOURNAL_NAME, JobJournal, SavedJob
from app.schema.admin import PullRequest
from tests.fakes.command_here import quire
from tests.fakes.http_daemon import HttpDaemon, job
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
    for name in ("pull.open_client", "run.open_client", "jobs.find_client"):
        monkeypatch.setattr(f"app.cli.{name}", daemon.client)
    return daemon


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


def test_a_detached_pull_starts_a_job_and_leaves(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("pull", "--detach", "--limit-rate", "2M", "org/repo") == 0
    assert daemon.requests[0] == ("/api/jobs", {"model": "org/repo", "limit_bytes_per_s": 2_000_000})
    assert capsys.readouterr().err == (
        "The daemon goes on with org/repo; `quire jobs` shows how far it is, `quire pull org/repo` follows it.\n"
    )


def test_a_detached_pull_that_fails_at_once_says_so(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"message": "There is no org/repo; look again.", "code": "model_not_found"}
    daemon.pull_answer = httpx.Response(404, json={"error": error})
    assert quire("pull", "--detach", "org/repo") == 1
    assert capsys.readouterr().err == "There is no org/repo; look again.\n"


def test_jobs_are_listed(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"message": "The disk is full; free 2 GB.", "type": "server_error", "param": None, "code": "x"}
    daemon.jobs = [
        job("a/running", bytes_per_s=11_200_000, seconds_left=100),
        job("a/paused", "paused"),
        job("a/failed", "failed", error=error, total=0),
    ]
    assert quire("jobs") == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "NAME       STATE    HERE   SIZE  RATE     LEFT",
        "a/running  running  120 B  1 kB  11 MB/s  1 min 40 s",
        "a/paused   paused   120 B  1 kB",
        "a/failed   failed",
    ]
    assert printed.err.splitlines() == [
        "a/failed: The disk is full; free 2 GB.",
        "`quire pull NAME` goes on with a paused download.",
    ]
    assert quire("jobs", "--json") == 0
    assert [each["model"] for each in json.loads(capsys.readouterr().out)["jobs"]] == [
        "a/running", "a/paused", "a/failed",
    ]  # fmt: skip


def test_downloads_are_cancelled_by_name_or_all(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.jobs = [job("a/one"), job("a/two", "paused"), job("a/three"), job("a/done", "done")]
    assert quire("pull", "--cancel", "A/one") == 0
    assert quire("pull", "--cancel", "--discard") == 0
    assert quire("pull", "--cancel", "a/one") == 1
    kept = "what has arrived is kept: `quire pull a/one` goes on from there, `quire rm a/one` deletes it"
    assert capsys.readouterr().err.splitlines() == [
        f"Cancelled a/one; {kept}.",
        "Cancelled a/two; 94 MB freed.",
        "Cancelled a/three; 94 MB freed.",
        "No download of a/one is on its way; `quire jobs` lists what there is.",
    ]
    assert daemon.jobs[-1]["state"] == "done"


def test_without_a_daemon_the_paused_downloads_are_known(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("jobs") == 0
    assert capsys.readouterr().err == "No downloads are on their way; `quire pull MODEL` starts one.\n"
    saved = SavedJob(
        id="1", request=PullRequest("a/b"), is_detached=True, created_at=0.0, total_bytes=1000, done_bytes=120
    )
    JobJournal(home / "state_dir" / JOURNAL_NAME).write([saved])
    assert quire("jobs") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["a/b", "paused", "120", "B", "1", "kB"]
    assert quire("pull", "--cancel") == 1
    assert "No daemon is running, so nothing is being downloaded" in capsys.readouterr().err


def test_a_daemon_of_other_settings_is_known_by_what_it_asked(
    daemon: HttpDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "The model hub cannot be reached: https://old.example failed; set HF_ENDPOINT."
    daemon.pull_error = {"message": message, "code": "hub_unreachable"}
    monkeypatch.setenv("HF_ENDPOINT", "https://old.example")
    assert quire("pull", "org/repo") == 1
    assert capsys.readouterr().err.splitlines()[-1] == message
    monkeypatch.setenv("HF_ENDPOINT", "https://new.example")
    assert quire("pull", "org/repo") == 1
    hint = "The running daemon does not know of https://new.example yet; `quire shutdown` makes room for one that does."
    assert capsys.readouterr().err.splitlines()[-1] == f"{message} {hint}"


@pytest.mark.parametrize(
    "arguments", [("--detach",), ("--detach", "--cancel", "m"), ("--discard", "m"), ("--dry-run", "--detach", "m")]
)
def test_options_that_do_not_go_together(arguments: tuple[str, ...], daemon: HttpDaemon) -> None:
    assert quire("pull", *arguments) == 2
    assert daemon.requests == []


def test_a_daemon_that_dies_leaves_a_sentence(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.pull_answer = httpx.Response(200, content=b'{"status":"looking"}\n')
    assert quire("pull", "org/repo") == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "The daemon ended in the middle of the download; what has arrived is kept, and `quire pull org/repo` "
        "goes on from there."
    )


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

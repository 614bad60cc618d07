"""ps, load, share, sleep, wake and events: what a person sees of models in memory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from app.residency_client import ResidencyClient
from app.schema.residency import RunningModelEntry
from tests.fakes.command_here import quire
from tests.fakes.http_daemon import HttpDaemon, running_model

EVENT = {
    "number": 1,
    "at": "2026-01-01T12:00:00Z",
    "kind": "evict",
    "model": "other",
    "why": "Evicted because m needs its memory.",
}
RAM = {
    "device": "cpu",
    "total": 16_000_000_000,
    "limit": 0.92,
    "models": 4_800_000_000,
    "others": 2_000_000_000,
    "free": 7_920_000_000,
}


@pytest.fixture(autouse=True)
def _own_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("QUIRE_CONFIG_DIR", "QUIRE_STATE_DIR", "QUIRE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("QUIRE_HOST", "QUIRE_PORT", "QUIRE_DEBUG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TZ", "UTC")


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> HttpDaemon:
    daemon = HttpDaemon(resident=[running_model()], devices=[RAM], events=[EVENT])
    for name in ("resident.require_client", "load.require_client", "load.open_client", "events.require_client"):
        monkeypatch.setattr(f"app.cli.{name}", daemon.client)
    return daemon


def test_ps_shows_models_and_how_memory_is_split(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("ps") == 0

    header, row, blank, bar, legend = capsys.readouterr().out.splitlines()
    assert header == "NAME  SIZE    DEVICE  SHARE  KV TOKENS  MAX CONCURRENCY  CONTEXT  RUNNING/WAITING  STATE  UNTIL"
    assert row == "m     4.8 GB  cpu     0.30   26,624     3.25x            8,192    2/0              ready  in use"
    assert (blank, bar[:7], len(bar)) == ("", "RAM  [#", 100)
    assert legend == "     # m 4.8 GB   x other programs 2.0 GB   . free 7.9 GB   - above memory_limit 1.3 GB"


def test_ps_as_json(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("ps", "--json") == 0

    printed = json.loads(capsys.readouterr().out)
    assert printed["models"][0]["max_concurrency"] == 3.25
    assert printed["devices"] == [RAM]


def test_ps_says_what_failed_and_what_sleeps(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.resident = [
        running_model("a", state="failed", note="Its worker died; ask again."),
        running_model("b", state="asleep", size_host=4_000_000_000),
    ]

    assert quire("ps") == 0

    assert capsys.readouterr().err.splitlines() == [
        "a: Its worker died; ask again.",
        "b sleeps, its weights in 4.0 GB of RAM.",
    ]


def test_ps_of_an_empty_memory(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.resident = []

    assert quire("ps") == 0

    printed = capsys.readouterr()
    assert printed.out.splitlines()[2].startswith("RAM  [")
    assert printed.err == "No model is in memory; `quire load MODEL` or `quire run MODEL` brings one there.\n"


def test_load_sends_what_was_asked_for_and_says_what_came_of_it(
    daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quire("load", "m", "--share", "0.3", "--pin", "--keep-alive", "20m") == 0

    assert daemon.requests[0] == ("/api/load", {"model": "m", "share": 0.3, "pin": True, "keep_alive": "20m"})
    assert capsys.readouterr().err.splitlines() == [
        "loading weights",
        "m is ready: 4.8 GB of RAM (share 0.30), 26,624 tokens of KV cache.",
    ]


def test_load_leaves_out_what_was_not_asked_for(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("load", "m", "--unpin") == 0
    assert quire("load", "m", "--json") == 0

    bodies = [body for path, body in daemon.requests if path == "/api/load"]
    assert bodies == [{"model": "m", "pin": False}, {"model": "m"}]
    assert json.loads(capsys.readouterr().out)["name"] == "m"


def test_load_of_what_is_not_installed(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("load", "absent") == 1
    assert "is not installed" in capsys.readouterr().err


def test_ctrl_c_leaves_the_daemon_loading_and_says_so(
    daemon: HttpDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.cli.load.follow", interrupted)

    assert quire("load", "m") == 130

    assert capsys.readouterr().err == "The daemon goes on loading m; `quire stop m` ends that.\n"


def test_load_says_when_a_model_stays_for_less_than_was_asked(
    daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.resident = [running_model(keep_alive="1m")]
    told = "It stays for 1m when idle, not {}: max_keep_alive allows no more."
    for asked in ("1h", "-1"):
        assert quire("load", "m", "--keep-alive", asked) == 0
        assert capsys.readouterr().err.splitlines()[-1] == told.format(asked)
    assert quire("load", "m", "--keep-alive", "30") == 0
    assert "max_keep_alive" not in capsys.readouterr().err


def test_load_of_a_model_that_left_at_once(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.resident = []
    assert quire("load", "m", "--keep-alive", "0") == 0
    assert capsys.readouterr().err.splitlines()[-1] == "m was loaded and leaves again; `quire events` says why."


@pytest.mark.parametrize(
    ("arguments", "exit_code", "sentence"),
    [
        (("load", "m", "--keep-alive", "soon"), 1, "keep_alive 'soon' is not a duration"),
        (("load", "m", "--share", "65"), 2, "above 0 and at most 1"),
        (("share", "m", "0"), 2, "above 0 and at most 1"),
        (("share", "m", "much"), 2, "not a valid float"),
        (("share", "absent", "0.4"), 1, "absent is not in memory; load it with `quire load absent`."),
    ],
)
def test_what_is_refused(
    daemon: HttpDaemon, arguments: tuple[str, ...], exit_code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quire(*arguments) == exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert sentence in printed.err


def test_share(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("share", "m", "0.4") == 0
    assert quire("share", "m", "0.5", "--json") == 0

    printed = capsys.readouterr()
    assert daemon.requests[0] == ("/api/share", {"model": "m", "share": 0.4})
    assert printed.err == "m has 4.8 GB of RAM (share 0.40), 26,624 tokens of KV cache now.\n"
    assert json.loads(printed.out)["share"] == 0.5


def test_share_of_a_model_that_sleeps(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.resident = [running_model(state="asleep")]

    assert quire("share", "m", "0.4") == 0

    assert capsys.readouterr().err == "m sleeps; it wakes with a share of 0.4.\n"


def test_what_takes_a_while_is_not_silent(
    daemon: HttpDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(client: ResidencyClient, _model: str) -> RunningModelEntry:
        await asyncio.sleep(0.01)
        return (await client.ps()).models[0]

    monkeypatch.setattr("app.cli.load._QUIET_S", 0.0)
    monkeypatch.setattr(ResidencyClient, "sleep", slow)

    assert quire("sleep", "m") == 0

    told, done = capsys.readouterr().err.splitlines()
    assert told == "This takes a while; `quire ps` in another terminal shows what m waits for."
    assert done.startswith("m sleeps")


def test_ctrl_c_does_not_undo_a_change_and_says_so(
    daemon: HttpDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ResidencyClient, "sleep", interrupted)

    assert quire("sleep", "m") == 130

    assert capsys.readouterr().err == "The daemon goes on with it; `quire ps` shows what became of m.\n"


def test_sleep_and_wake(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("sleep", "m") == 0
    assert quire("wake", "m") == 0

    assert daemon.paths() == ["/api/sleep", "/api/wake"]
    assert capsys.readouterr().err.splitlines() == [
        "m sleeps, its weights in 4.0 GB of RAM; `quire wake m` or the next request brings it back.",
        "m is ready: 4.8 GB of RAM (share 0.30), 26,624 tokens of KV cache.",
    ]


def test_events(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("events") == 0
    assert quire("events", "--follow") == 0

    line = "evict   other  Evicted because m needs its memory."
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert all(one.endswith(line) and one.startswith("2026-01-0") for one in printed)
    assert daemon.paths() == ["/api/events", "/api/events"]


def test_events_as_json(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("events", "--json") == 0
    assert json.loads(capsys.readouterr().out)["events"][0]["why"] == EVENT["why"]
    assert quire("events", "--follow", "--json") == 0
    assert json.loads(capsys.readouterr().out)["number"] == 1


def test_no_events_yet(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.events = []
    assert quire("events") == 0
    assert capsys.readouterr().err.startswith("Nothing has happened since the daemon started; ")


@pytest.mark.parametrize("arguments", [("share", "m", "0.4"), ("sleep", "m"), ("wake", "m"), ("events",)])
def test_what_is_about_models_in_memory_starts_no_daemon(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert quire(*arguments) == 1
    assert capsys.readouterr().err == "No daemon is running; `quire run MODEL` or `quire serve` starts one.\n"

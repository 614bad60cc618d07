from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from app.cli.resume import Resume
from tests.fakes.command_here import quire
from tests.fakes.http_daemon import HttpDaemon


class FakeStdin(io.StringIO):
    def __init__(self, text: str = "", *, is_terminal: bool = False) -> None:
        super().__init__(text)
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HttpDaemon:
    daemon = HttpDaemon(installed={"m"})
    monkeypatch.setattr("app.cli.run.open_client", daemon.client)
    monkeypatch.setattr(sys, "stdin", FakeStdin())
    for name in ("QUIRE_CONFIG_DIR", "QUIRE_STATE_DIR", "QUIRE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return daemon


def saved_chat(chat_id: str, model: str, *said: tuple[str, str]) -> dict[str, Any]:
    at = "2026-01-01T00:00:00Z"
    chat = {"id": chat_id, "title": "t", "model": model, "tip": "h", "created_at": at, "updated_at": at}
    messages = [
        {"hash": str(i), "parent": None, "role": role, "content": text, "created_at": at}
        for i, (role, text) in enumerate(said)
    ]
    return {"chat": chat, "messages": messages, "turns": []}


def chat_request(daemon: HttpDaemon) -> dict[str, Any]:
    (body,) = (body for path, body in daemon.requests if path == "/v1/chat/completions")
    assert isinstance(body, dict)
    return body


def test_prints_the_answer_and_nothing_else(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("run", "m", "say", "hello") == 0
    assert capsys.readouterr().out == "Hello there.\n"
    assert chat_request(daemon)["messages"] == [{"role": "user", "content": "say hello"}]
    assert daemon.paths() == ["/api/load", "/v1/chat/completions"]


def test_an_answer_with_its_own_line_end_gets_no_other(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer = ["a\n", "b\n"]
    assert quire("run", "m", "x") == 0
    assert capsys.readouterr().out == "a\nb\n"


def test_options_reach_the_request(daemon: HttpDaemon) -> None:
    options = ("--system", "Be brief.", "--temperature", "0", "--max-tokens", "9", "--seed", "4")
    assert quire("run", *options, "m", "--", "-1 + 2?") == 0
    request = chat_request(daemon)
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "-1 + 2?"},
    ]
    assert (request["temperature"], request["max_tokens"], request["seed"]) == (0.0, 9, 4)


@pytest.mark.parametrize(
    ("piped", "words", "prompt"),
    [
        ("a diff\n", ("Describe", "it."), "a diff\n\nDescribe it."),
        ("only this\n", (), "only this"),
        ("  indented\n  text\n", (), "  indented\n  text"),
        ("\n \n", ("words",), "words"),
        ("", ("words",), "words"),
    ],
)
def test_standard_input_goes_before_the_words(
    daemon: HttpDaemon, monkeypatch: pytest.MonkeyPatch, piped: str, words: tuple[str, ...], prompt: str
) -> None:
    monkeypatch.setattr(sys, "stdin", FakeStdin(piped))
    assert quire("run", "m", *words) == 0
    assert chat_request(daemon)["messages"][0]["content"] == prompt


def test_a_terminal_is_not_read_when_there_are_words(daemon: HttpDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", FakeStdin("typed later", is_terminal=True))
    assert quire("run", "m", "words") == 0
    assert chat_request(daemon)["messages"][0]["content"] == "words"


@pytest.mark.parametrize("words", [(), ("",), ("  ",)])
def test_an_empty_prompt_is_wrong_usage(
    daemon: HttpDaemon, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert quire("run", "m", *words) == 2
    assert "The prompt is empty" in capsys.readouterr().err
    assert daemon.requests == []


def test_input_that_is_not_text_is_refused(
    daemon: HttpDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00"), encoding="utf-8"))
    assert quire("run", "m") == 1
    assert "not text" in capsys.readouterr().err


def test_a_missing_model_is_pulled_first(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.installed = set()
    assert quire("run", "m", "hi") == 0
    assert daemon.paths() == ["/api/load", "/api/pull", "/api/load", "/v1/chat/completions"]
    printed = capsys.readouterr()
    assert printed.out == "Hello there.\n"
    assert "downloading w.gguf: 120 B of 1 kB (12 %)" in printed.err


def test_a_model_that_cannot_be_pulled_is_one_sentence(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.installed = set()
    daemon.pull_error = {
        "message": "https://huggingface.co cannot be reached; set HF_ENDPOINT to a mirror.",
        "code": "hub_unreachable",
    }
    assert quire("run", "m", "hi") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1] == "https://huggingface.co cannot be reached; set HF_ENDPOINT to a mirror."
    assert "Traceback" not in printed.err


def test_an_error_in_the_middle_keeps_the_text(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    import httpx

    daemon.answer = ["Half of", httpx.RemoteProtocolError("cut")]
    assert quire("run", "m", "hi") == 1
    printed = capsys.readouterr()
    assert printed.out == "Half of\n"
    assert "connection to the daemon" in printed.err.splitlines()[-1]


def test_ctrl_c_keeps_the_text_and_exits_130(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer = ["Half of", KeyboardInterrupt()]
    assert quire("run", "m", "hi") == 130
    assert capsys.readouterr().out == "Half of\n"


def test_json_has_the_text_and_the_numbers(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("run", "m", "hi", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == "Hello there."
    assert result["finish_reason"] == "stop"
    assert result["usage"] == {"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 0}


def test_verbose_adds_the_numbers_on_stderr(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("run", "--verbose", "m", "hi") == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello there.\n"
    assert printed.err.splitlines()[-1].startswith("2 tokens · ")


@pytest.mark.parametrize("name", ["", "a b", "../x\ny", "UPPER:case:again"])
def test_a_name_that_cannot_be_one(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert quire("run", name, "hi") == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert daemon.requests == []


def test_a_path_is_sent_absolute(daemon: HttpDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    daemon.installed = {str(tmp_path / "w.gguf")}
    assert quire("run", "./w.gguf", "hi") == 0
    assert chat_request(daemon)["model"] == str(tmp_path / "w.gguf")


def test_without_words_a_terminal_gets_the_chat(daemon: HttpDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[Any, ...]] = []

    async def chat(*arguments: Any) -> None:
        opened.append(arguments[1:])

    monkeypatch.setattr("app.cli.run._chat", chat)
    monkeypatch.setattr(sys, "stdin", FakeStdin(is_terminal=True))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert quire("run", "m", "--seed", "1") == 0
    assert opened == [("m", None, {"seed": 1}, Resume())]


@pytest.mark.parametrize("options", [("--continue",), ("--chat", "abc")])
def test_a_saved_chat_goes_on_and_is_saved_further(
    daemon: HttpDaemon, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.saved = {
        "other": saved_chat("other", "another", ("user", "no")),
        "abc": saved_chat("abc", "m", ("system", "S"), ("user", "1?"), ("assistant", "1."), ("user", "cut")),
    }
    assert quire("run", "m", "2?", *options) == 0
    assert capsys.readouterr().out == "Hello there.\n"
    (body,) = (body for path, body in daemon.requests if path == "/api/chats/abc/turns")
    assert [message["content"] for message in body["messages"]] == ["S", "1?", "1.", "2?"]
    assert quire("run", "m", "2?", *options, "--system", "T") == 0
    assert [message["content"] for message in daemon.requests[-1][1]["messages"]] == ["T", "1?", "1.", "2?"]


def test_there_must_be_a_chat_to_go_on_with(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("run", "m", "2?", "--continue") == 1
    assert capsys.readouterr().err == ("There is no saved chat with m yet; `quire chats` lists those with others.\n")
    assert quire("run", "m", "2?", "--continue", "--chat", "abc") == 2
    assert "not both" in capsys.readouterr().err


def test_an_embedding_model_prints_a_vector(daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.vectors["m"] = [0.25, -1.5]
    assert quire("run", "m", "some", "text") == 0
    assert capsys.readouterr().out == "[0.25,-1.5]\n"
    assert daemon.requests[-1] == ("/v1/embeddings", {"model": "m", "input": "some text"})
    assert quire("run", "m", "some text", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "model": "m", "embedding": [0.25, -1.5], "usage": {"prompt_tokens": 4},
    }  # fmt: skip


def test_what_is_for_answers_alone_is_not_dropped_for_a_vector(
    daemon: HttpDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.vectors["m"] = [0.25]
    assert quire("run", "m", "text", "--system", "Be brief.") == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("m does something else; choose another model.")


def test_an_embedding_model_does_not_chat(
    daemon: HttpDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.vectors["m"] = [0.25]
    monkeypatch.setattr("app.cli.run._is_terminal", lambda: True)
    assert quire("run", "m") == 1
    assert "m is an embedding model, which cannot chat; `quire run m TEXT` prints" in capsys.readouterr().err

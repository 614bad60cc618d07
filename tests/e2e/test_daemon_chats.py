"""Saved chats and usage through the real daemon on a real socket; only the engine behind it is a fake."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.client import ChatFinished, ClientError, QuireClient
from app.schema.chats import ImportedChatBody, ImportedMessage
from store.chats.tree import ChatsDb
from store.database import open_database
from tests.fakes.daemon import FakeDaemon, eventually, running_daemon
from tests.fakes.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("daemon")


@pytest.fixture(scope="module")
def daemon(home: Path) -> Iterator[FakeDaemon]:
    with running_daemon(home) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def model(home: Path) -> str:
    return str(write_tiny_model(home / "echo"))


@pytest.fixture
async def http(daemon: FakeDaemon) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(daemon) as client:
        yield client


def connect(daemon: FakeDaemon) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=daemon.base_url, trust_env=False, timeout=30)


def body(model: str, *texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"model": model, "messages": messages, "stream": True, **fields}


async def new_chat(http: httpx.AsyncClient, model: str) -> str:
    answer = await http.post("/api/chats", json={"model": model})
    assert answer.status_code == 201, answer.text
    chat_id = answer.json()["id"]
    assert isinstance(chat_id, str)
    return chat_id


async def say(http: httpx.AsyncClient, chat_id: str, model: str, *texts: str, **fields: Any) -> str:
    """Send a turn; the text of its answer."""
    answer = await http.post(f"/api/chats/{chat_id}/turns", json=body(model, *texts, **fields))
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)


async def details(http: httpx.AsyncClient, chat_id: str) -> dict[str, Any]:
    answer = await http.get(f"/api/chats/{chat_id}")
    assert answer.status_code == 200, answer.text
    result = answer.json()
    assert isinstance(result, dict)
    return result


async def test_a_chat_is_saved_listed_found_and_exported(http: httpx.AsyncClient, model: str) -> None:
    chat_id = await new_chat(http, model)
    assert chat_id not in {chat["id"] for chat in (await http.get("/api/chats")).json()["chats"]}
    assert await say(http, chat_id, model, "今天天气", temperature=0, seed=3) == "今天天气"
    assert await say(http, chat_id, model, "今天天气", "今天天气", "and tomorrow?") == "and tomorrow?"

    (chat,) = (await http.get("/api/chats", params={"model": model})).json()["chats"]
    assert (chat["id"], chat["title"], chat["model"]) == (chat_id, "今天天气", model)
    shown = await details(http, chat_id[:12])
    assert [(one["role"], one["content"]) for one in shown["messages"]] == [
        ("user", "今天天气"),
        ("assistant", "今天天气"),
        ("user", "and tomorrow?"),
        ("assistant", "and tomorrow?"),
    ]
    first, second = shown["turns"]
    assert (first["status"], first["params"], first["completion_tokens"]) == (
        "done",
        {"temperature": 0.0, "seed": 3},
        13,
    )
    assert first["prompt_tokens"] == 12
    assert second["message"] == shown["messages"][-1]["hash"] == chat["tip"]
    assert all(turn["time_to_first_token_s"] <= turn["duration_s"] for turn in shown["turns"])

    for query, role in (("天气", "title"), ("TOMORROW", "user")):
        (hit,) = (await http.get("/api/chats/search", params={"q": query})).json()["hits"]
        assert (hit["chat"]["id"], hit["role"]) == (chat_id, role)
    exported = await http.get(f"/api/chats/{chat_id}/export")
    assert exported.headers["content-type"].startswith("text/markdown")
    assert "## You\n\nand tomorrow?\n" in exported.text
    lines = (await http.get(f"/api/chats/{chat_id}/export", params={"format": "jsonl"})).text.splitlines()
    assert [json.loads(line)["content"] for line in lines][2:] == ["and tomorrow?", "and tomorrow?"]


async def test_a_chat_is_renamed_forked_and_deleted(http: httpx.AsyncClient, model: str) -> None:
    chat_id = await new_chat(http, model)
    await say(http, chat_id, model, "one")
    question, _ = (await details(http, chat_id))["messages"]
    assert (await http.patch(f"/api/chats/{chat_id}", json={"title": "Numbers"})).json()["title"] == "Numbers"
    fork = (await http.post(f"/api/chats/{chat_id}/fork", json={"message": question["hash"]})).json()
    assert (fork["title"], fork["tip"]) == ("Numbers", question["hash"])
    assert (await http.delete(f"/api/chats/{chat_id}")).status_code == 200
    assert (await http.get(f"/api/chats/{chat_id}")).json()["error"]["code"] == "chat_not_found"
    assert [one["content"] for one in (await details(http, fork["id"]))["messages"]] == ["one"]


@pytest.mark.parametrize(
    ("method", "path", "given", "status", "code"),
    [
        ("GET", "/api/chats/0000000000000000", None, 404, "chat_not_found"),
        ("POST", "/api/chats/0000000000000000/turns", body("MODEL", "hi"), 404, "chat_not_found"),
        ("POST", "/api/chats/ID/turns", body("MODEL", "hi", stream=False), 400, "invalid_request"),
        ("POST", "/api/chats/ID/turns", body("MODEL", "hi", n=2), 400, "invalid_request"),
        ("POST", "/api/chats/ID/turns", body("MODEL", "hi", nonsense=2), 400, "invalid_request"),
        ("POST", "/api/chats/ID/fork", {"message": "nonsense"}, 404, "chat_not_found"),
        ("GET", "/api/chats/ID?tip=nonsense", None, 404, "chat_not_found"),
        ("GET", "/api/chats/ID/export?format=pdf", None, 400, "bad_request"),
        ("GET", "/api/chats?limit=0", None, 400, "invalid_request"),
        ("GET", "/api/chats/search", None, 400, "bad_request"),
        ("POST", "/api/chats", {"model": "m", "colour": 1}, 400, "invalid_request"),
        ("POST", "/api/chats/import", {"model": "m", "branches": [[]]}, 400, "invalid_request"),
    ],
)
async def test_what_cannot_be_done_is_explained(
    http: httpx.AsyncClient, model: str, method: str, path: str, given: dict[str, Any] | None, status: int, code: str
) -> None:
    chat_id = await new_chat(http, model)
    if given and given.get("model") == "MODEL":
        given = {**given, "model": model}
    answer = await http.request(method, path.replace("ID", chat_id), json=given)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_what_was_typed_is_kept_when_there_is_no_answer(http: httpx.AsyncClient) -> None:
    chat_id = await new_chat(http, "no/such-model")
    answer = await http.post(f"/api/chats/{chat_id}/turns", json=body("no/such-model", "a long letter"))
    assert answer.json()["error"]["code"] == "model_not_found"
    shown = await details(http, chat_id)
    assert [one["content"] for one in shown["messages"]] == ["a long letter"]
    assert [turn["status"] for turn in shown["turns"]] == ["error"]


async def test_a_client_that_leaves_keeps_what_it_got(http: httpx.AsyncClient, home: Path) -> None:
    slow = str(write_tiny_model(home / "slow", behaviour={"step_delay_s": 0.02}))
    chat_id = await new_chat(http, slow)
    async with http.stream("POST", f"/api/chats/{chat_id}/turns", json=body(slow, "abc", ignore_eos=True)) as response:
        received = 0
        async for line in response.aiter_lines():
            received += line.startswith("data: ")
            if received > 5:
                break

    async def ended() -> bool:
        return (await details(http, chat_id))["turns"][0]["status"] == "cancelled"

    await eventually(ended)
    text = (await details(http, chat_id))["messages"][-1]["content"]
    assert text.startswith("abcab")


async def test_a_killed_daemon_keeps_the_question_and_the_partial_answer(tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "slow", behaviour={"step_delay_s": 0.02}))
    with running_daemon(tmp_path) as daemon:
        async with connect(daemon) as http:
            chat_id = await new_chat(http, model)
            request = body(model, "abc", ignore_eos=True)
            async with http.stream("POST", f"/api/chats/{chat_id}/turns", json=request) as response:
                # Elsewhere, so that the stream stays open while the daemon is asked what it has saved.
                async def has_saved_some() -> bool:
                    turns = (await details(other, chat_id))["turns"]
                    return bool(turns and turns[0]["partial"])

                async with connect(daemon) as other:
                    await eventually(has_saved_some)
                os.kill(daemon.process.pid, signal.SIGKILL)
                with pytest.raises(httpx.TransportError):
                    await response.aread()
        daemon.process.wait(10)
    (tmp_path / "state" / "daemon.json").unlink()

    with running_daemon(tmp_path) as daemon:
        async with connect(daemon) as http:
            shown = await details(http, chat_id)
            assert [turn["status"] for turn in shown["turns"]] == ["cancelled"]
            question, answer = shown["messages"]
            assert question["content"] == "abc"
            assert answer["content"].startswith("abcabc")
        assert "left unfinished" in daemon.log_text()


async def test_nothing_is_saved_when_that_is_not_wanted(tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "echo"))
    with running_daemon(tmp_path, QUIRE_SAVE_CHATS="false") as daemon:
        async with connect(daemon) as http:
            for answer in (
                await http.post("/api/chats", json={"model": model}),
                await http.post("/api/chats/x/turns", json=body(model, "secret words")),
            ):
                assert answer.json()["error"]["code"] == "chats_off"
            await http.post("/v1/chat/completions", json={**body(model, "secret words"), "stream": False})
    files = [file.read_bytes() for file in (tmp_path / "state").rglob("*") if file.is_file()]
    assert files
    assert not any(b"secret words" in content for content in files)


async def test_models_answer_when_the_database_cannot_be_used(tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "echo"))
    (tmp_path / "state" / "data" / "quire.db").mkdir(parents=True)
    with running_daemon(tmp_path) as daemon:
        async with connect(daemon) as http:
            refused = await http.post("/api/chats", json={"model": model})
            assert refused.json()["error"]["code"] == "database_unusable"
            given = {**body(model, "hi"), "stream": False}
            assert (await http.post("/v1/chat/completions", json=given)).status_code == 200
        assert "Chats and usage cannot be saved" in daemon.log_text()


async def test_a_damaged_database_is_moved_aside_and_the_daemon_starts(tmp_path: Path) -> None:
    database = tmp_path / "state" / "data" / "quire.db"
    database.parent.mkdir(parents=True)
    database.write_bytes(b"garbage" * 1000)
    with running_daemon(tmp_path) as daemon:
        async with connect(daemon) as http:
            assert (await http.get("/api/chats")).json() == {"chats": []}
        assert "moved to" in daemon.log_text()
    assert list(database.parent.glob("quire.db.broken-*"))


async def test_the_command_line_reads_while_the_daemon_writes(
    daemon: FakeDaemon, http: httpx.AsyncClient, model: str
) -> None:
    chat_id = await new_chat(http, model)
    connection = open_database(daemon.state_dir / "data" / "quire.db")
    chats = ChatsDb(connection)
    for i in range(5):
        await say(http, chat_id, model, f"question {i}")
        assert chats.messages(chat_id)[-1].message.text == f"question {i}"
        chats.rename(chat_id, f"title {i}")
    assert (await details(http, chat_id))["chat"]["title"] == "title 4"
    connection.close()


async def test_usage_counts_what_was_served_and_what_was_broken_off(http: httpx.AsyncClient, home: Path) -> None:
    model = str(write_tiny_model(home / "counted", behaviour={"step_delay_s": 0.01}))
    for _ in range(3):
        await http.post("/v1/completions", json={"model": model, "prompt": "a" * 20, "max_tokens": 5})
    async with http.stream(
        "POST", "/v1/completions", json={"model": model, "prompt": "b" * 40, "max_tokens": 400, "stream": True}
    ) as response:
        async for _ in response.aiter_lines():
            break

    async def all_counted() -> bool:
        usage = {entry["model"]: entry for entry in (await http.get("/api/usage")).json()["models"]}
        return usage[model]["requests"] == 4

    await eventually(all_counted)
    (entry,) = [one for one in (await http.get("/api/usage")).json()["models"] if one["model"] == model]
    assert (entry["prompt_p50"], entry["prompt_p99"], entry["prompt_max"]) == (20, 40, 40)
    assert entry["output_p50"] == 5
    assert entry["output_max"] < 400
    assert entry["max_model_len"] == 512
    assert entry["needed_model_len"] == 40 + entry["output_max"]
    assert entry["max_at_once"] == 1
    assert "max_model_len" in entry["advice"]


async def test_usage_knows_how_many_were_open_at_once(http: httpx.AsyncClient, home: Path) -> None:
    model = str(write_tiny_model(home / "together", behaviour={"step_delay_s": 0.02}))
    body = {"model": model, "prompt": "a" * 20, "max_tokens": 30}
    await http.post("/v1/completions", json={**body, "max_tokens": 1})
    await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(3)))

    async def all_counted() -> bool:
        usage = {entry["model"]: entry for entry in (await http.get("/api/usage")).json()["models"]}
        return usage[model]["max_at_once"] == 3

    await eventually(all_counted)


async def test_the_client_asks_the_daemon_as_the_commands_do(daemon: FakeDaemon, model: str) -> None:
    async with QuireClient(daemon.base_url) as client:
        chat = await client.chats.create(model)
        events = [
            event async for event in client.chat([{"role": "user", "content": "blue/sky?"}], model, chat_id=chat.id)
        ]
        assert isinstance(events[-1], ChatFinished)
        assert [one.content for one in (await client.chats.get(chat.id)).messages] == ["blue/sky?", "blue/sky?"]
        assert (await client.chats.list(model=model, limit=1))[0].id == chat.id
        assert [hit.chat.id for hit in await client.chats.search("blue/sky?")] == [chat.id]
        assert (await client.chats.export(chat.id, "markdown")).startswith("---\n")
        assert (await client.chats.rename(chat.id, "Sky")).title == "Sky"
        assert model in {entry.model for entry in await client.usage()}
        imported = ImportedChatBody("m", ((ImportedMessage("user", "from elsewhere"),),), created_at=1.0)
        assert [(await client.chats.add(imported)).is_new for _ in range(2)] == [True, False]
        await client.chats.delete(chat.id)
        for gone in (chat.id, "../tags"):
            with pytest.raises(ClientError) as caught:
                await client.chats.get(gone)
            assert caught.value.status == 404

"""The daemon's HTTP API as a function, for clients and commands: no socket, no models.

Behaves as scripted by its fields and records what was asked.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from app.client import QuireClient

NOT_FOUND = {"error": {"message": "m is not installed; get it with `quire pull m`.", "code": "model_not_found"}}


WRONG_TASK = {"message": "m does something else; choose another model.", "code": "wrong_task"}


class Chunks(httpx.AsyncByteStream):
    """A streamed body; an exception among the chunks is raised in its place."""

    def __init__(self, chunks: list[bytes | BaseException]) -> None:
        self.chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk


@dataclass
class HttpDaemon:
    """`answer` are the pieces of every chat answer; `pull_error` ends a pull instead of success, `pull_answer` is sent
    in place of everything.

    Of the models in `vectors` an answer is a vector.  `resident` are the models of GET /api/ps, `devices` how memory is
    split there, `events` those of GET /api/events.  `saved` are the answers of GET /api/chats/ID by id, the latest
    first; `jobs` those of GET /api/jobs.
    """

    answer: list[str | BaseException] = field(default_factory=lambda: ["Hello", " there."])
    installed: set[str] = field(default_factory=lambda: {"m"})
    resident: list[dict[str, Any]] = field(default_factory=list)
    devices: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    pull_error: dict[str, Any] | None = None
    pull_answer: httpx.Response | None = None
    chat_error: tuple[int, dict[str, Any]] | None = None
    saved: dict[str, dict[str, Any]] = field(default_factory=dict)
    vectors: dict[str, list[float]] = field(default_factory=dict)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    requests: list[tuple[str, Any]] = field(default_factory=list)

    def client(self, *_: object, is_offline: bool = False, **_options: object) -> QuireClient:
        """A client of this daemon; takes the place of `open_client` and its kin."""
        return QuireClient("http://127.0.0.1:1", is_offline=is_offline, transport=httpx.MockTransport(self._handle))

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    def _handle(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content) if request.content else {}
        self.requests.append((path, body))
        match path:
            case "/api/ps":
                return httpx.Response(200, json={"models": self.resident, "devices": self.devices})
            case "/api/events" if "follow" in request.url.params:
                return _lines(*self.events)
            case "/api/events":
                return httpx.Response(200, json={"events": self.events})
            case "/api/share" | "/api/pin" | "/api/sleep" | "/api/wake":
                return self._change(path.removeprefix("/api/"), body)
            case "/api/stop":
                return httpx.Response(200, json={"stopped": any(r["name"] == body["model"] for r in self.resident)})
            case "/api/pull":
                return self._pull(body["model"])
            case "/api/jobs" if request.method == "GET":
                return httpx.Response(200, json={"jobs": self.jobs})
            case "/api/jobs":
                self.jobs.append(job(body["model"]))
                return httpx.Response(201, json=self.jobs[-1])
            case _ if path.startswith("/api/jobs/"):
                return self._job(path.split("/")[3], discards="discard" in request.url.params)
            case "/api/chats":
                of_model = [
                    one["chat"] for one in self.saved.values() if one["chat"]["model"] == request.url.params["model"]
                ]
                return httpx.Response(200, json={"chats": of_model})
            case _ if request.method == "GET" and path.startswith("/api/chats/"):
                return httpx.Response(200, json=self.saved[path.removeprefix("/api/chats/")])
        if body["model"] not in self.installed:
            return httpx.Response(404, json=NOT_FOUND)
        match path:
            case "/api/load":
                return _lines({"status": "loading weights", "total": 4, "completed": 2}, {"status": "success"})
            case "/api/delete":
                self.installed.remove(body["model"])
                return httpx.Response(200, json={"freed_bytes": 94_000_000})
            case "/v1/chat/completions" if body["model"] in self.vectors:
                return httpx.Response(400, json={"error": WRONG_TASK})
            case "/v1/chat/completions":
                return self._chat()
            case "/v1/embeddings":
                return self._embed(body["model"])
            case "/api/show":
                return httpx.Response(200, json=card(body["model"], "embedding" if self.vectors else "completion"))
            case _ if path.startswith("/api/chats/") and path.endswith("/turns"):
                return self._chat()
        raise AssertionError(f"no such route: {path}")

    def _change(self, what: str, body: dict[str, Any]) -> httpx.Response:
        """A model in memory after it was changed."""
        found = next((one for one in self.resident if one["name"] == body["model"]), None)
        if found is None:
            message = f"{body['model']} is not in memory; load it with `quire load {body['model']}`."
            return httpx.Response(409, json={"error": {"message": message, "code": "model_not_loaded"}})
        changes: dict[str, dict[str, Any]] = {
            "share": {"share": body.get("share")},
            "pin": {"pinned": body.get("pin")},
            "sleep": {"state": "asleep", "size_host": 4_000_000_000},
            "wake": {"state": "ready", "size_host": 0},
        }
        found |= changes[what]
        return httpx.Response(200, json=found)

    def _job(self, job_id: str, *, discards: bool) -> httpx.Response:
        """Progress of a job (that of /api/pull), or its cancellation."""
        (found,) = (one for one in self.jobs if one["id"] == job_id)
        if self.requests[-1][0].endswith("/events"):
            return self._pull(found["model"])
        found["state"] = "cancelled"
        return httpx.Response(200, json={"job": found, "freed_bytes": 94_000_000 if discards else 0})

    def _pull(self, model: str) -> httpx.Response:
        if self.pull_answer is not None:
            return self.pull_answer
        steps = [
            {"status": "looking for it"},
            *({"status": "downloading", "file": "w.gguf", "total": 1000, "completed": n} for n in (0, 50, 120, 1000)),
        ]
        if self.pull_error:
            return _lines(*steps, {"error": self.pull_error})
        self.installed.add(model)
        return _lines(*steps, {"status": "success"})

    def _embed(self, model: str) -> httpx.Response:
        if model not in self.vectors:
            return httpx.Response(400, json={"error": WRONG_TASK})
        entry = {"object": "embedding", "index": 0, "embedding": self.vectors[model]}
        usage = {"prompt_tokens": 4, "total_tokens": 4}
        return httpx.Response(200, json={"object": "list", "data": [entry], "model": model, "usage": usage})

    def _chat(self) -> httpx.Response:
        if self.chat_error:
            return httpx.Response(self.chat_error[0], json={"error": self.chat_error[1]})
        chunks: list[bytes | BaseException] = []
        for piece in self.answer:
            chunks.append(_event({"choices": [{"delta": {"content": piece}}]}) if isinstance(piece, str) else piece)
        chunks.append(_event({"choices": [{"delta": {}, "finish_reason": "stop"}]}))
        chunks.append(_event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": len(self.answer)}}))
        chunks.append(b"data: [DONE]\n\n")
        return httpx.Response(200, stream=Chunks(chunks))


def running_model(name: str = "m", **facts: Any) -> dict[str, Any]:
    """A model in memory as the daemon lists it."""
    entry = {
        "name": name,
        "model": name,
        "state": "ready",
        "size": 4_800_000_000,
        "size_vram": 0,
        "size_host": 0,
        "digest": "d",
        "device": "cpu",
        "share": None,
        "share_in_force": 0.3,
        "pinned": False,
        "keep_alive": "30m",
        "expires_at": None,
        "context_length": 8192,
        "kv_cache_tokens": 26_624,
        "kv_cache_usage": 0.25,
        "max_concurrency": 3.25,
        "num_requests": 2,
        "num_running": 2,
        "num_waiting": 0,
        "task": "generate",
        "dtype": "float32",
        "architecture": "llama",
        "loaded_at": "2026-01-01T00:00:00Z",
        "pid": 5,
    }
    return entry | facts


def job(model: str, state: str = "running", **facts: Any) -> dict[str, Any]:
    """A job as the daemon lists it."""
    unknown = dict.fromkeys(("seconds_left", "error", "started_at", "ended_at"))
    counts = {"total": 1000, "completed": 120, "bytes_per_s": 0}
    rest = {"status": "", "files": [], "detached": False, "created_at": "2026-01-01T00:00:00Z"}
    return {"id": model.replace("/", "-"), "model": model, "state": state, **unknown, **counts, **rest, **facts}


def card(model: str, capability: str) -> dict[str, Any]:
    """What the daemon shows of a model."""
    details = {"format": "gguf", "family": "f", "parameter_size": "1", "quantization_level": "F32", "num_parameters": 1}
    unknown = dict.fromkeys(("path", "modified_at", "license"))
    known = {"name": model, "model": model, "source": "hub", "digest": "", "size": 1, "has_chat_template": False}
    rest = {"sampling_defaults": {}, "details": details, "memory": {"weight_bytes": 1}, "capabilities": [capability]}
    return {**unknown, **known, **rest}


def _lines(*values: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, content=b"".join(json.dumps(value).encode() + b"\n" for value in values))


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"

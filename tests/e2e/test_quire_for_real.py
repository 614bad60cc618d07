"""Nothing faked: the `quire` command, its daemon, real workers, and the real starter model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from store.models import InstalledModel
from tests.fakes.real_quire import Quire

QUESTION = "What is the capital of Japan?"


@pytest.fixture(scope="module")
def quire(tmp_path_factory: pytest.TempPathFactory, starter: InstalledModel, starter_root: Path) -> Iterator[Quire]:
    quire = Quire(tmp_path_factory.mktemp("quire"), starter_root)
    yield quire
    quire.run("shutdown")


@pytest.fixture
def client(quire: Quire) -> Iterator[openai.OpenAI]:
    loaded = quire.run("run", "starter", "Say hello.", "--max-tokens", "2")
    assert loaded.returncode == 0, loaded.stderr
    with openai.OpenAI(base_url=f"{quire.base_url()}/v1", api_key="none", max_retries=0) as client:
        yield client


def metric(quire: Quire, name: str) -> float:
    text = httpx.get(f"{quire.base_url()}/metrics", trust_env=False).text
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not among the metrics"
    return float(found[1])


def wait_until(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


def test_two_commands_at_once_start_one_daemon_and_both_answer(quire: Quire):
    first = quire.start("run", "starter", QUESTION, "--temperature", "0")
    second = quire.start("run", "starter", "--temperature", "0", "--json")
    second_out, second_err = second.communicate(QUESTION, timeout=120)
    first_out, first_err = first.communicate("", timeout=120)
    assert (first.returncode, second.returncode) == (0, 0), first_err + second_err
    assert "Tokyo" in first_out
    answer = json.loads(second_out)
    assert answer["text"].strip() == first_out.strip()
    assert answer["usage"]["completion_tokens"] > 3
    assert (first_err + second_err).count("Starting the daemon") == 1


def test_ps_and_list_tell_the_truth(quire: Quire, client: openai.OpenAI):
    (resident,) = json.loads(quire.run("ps", "--json").stdout)["models"]
    assert resident["name"] == "smollm2:135m"
    assert "smollm2:135m" in quire.run("list").stdout
    assert "smollm2:135m" in [model.id for model in client.models.list()]


def test_greedy_answers_are_the_same_alone_and_together(quire: Quire, client: openai.OpenAI):
    prompts = [f"Count from {start} to ten:" for start in ("one", "two", "three", "four", "five", "six", "seven")]

    async def complete_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=str(client.base_url), api_key="none", max_retries=0) as together:
            answers = await asyncio.gather(
                *(
                    together.completions.create(model="starter", prompt=prompt, max_tokens=24, temperature=0)
                    for prompt in prompts
                )
            )
            return [answer.choices[0].text for answer in answers]

    alone = [
        client.completions.create(model="starter", prompt=prompt, max_tokens=24, temperature=0).choices[0].text
        for prompt in prompts
    ]
    assert asyncio.run(complete_all()) == alone
    assert metric(quire, "quire_prefix_cache_queries_total") > 0


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_gives_its_blocks_back(quire: Quire, client: openai.OpenAI, is_streamed: bool):
    body = {"model": "starter", "prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}
    url = f"{quire.base_url()}/v1/completions"
    with httpx.Client(trust_env=False, timeout=2.0) as leaving, contextlib.suppress(httpx.ReadTimeout):
        with leaving.stream("POST", url, json={**body, "stream": is_streamed}) as response:
            next(response.iter_lines())
        assert is_streamed, "an answer of 4,000 tokens cannot be complete within two seconds"
    wait_until(lambda: metric(quire, "quire_num_requests_running") == 0)
    assert metric(quire, "quire_kv_cache_usage_perc") == 0.0


def test_a_killed_worker_costs_one_error_and_the_next_request_gets_another(quire: Quire, client: openai.OpenAI):
    worker = quire.worker()
    stream = client.completions.create(
        model="starter", prompt="Once upon a time", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    worker.kill()
    with pytest.raises(openai.APIError, match=r"worker|signal"):
        for _ in stream:
            pass
    answer = client.chat.completions.create(
        model="starter", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=20
    )
    assert "Tokyo" in (answer.choices[0].message.content or "")
    assert quire.worker().pid != worker.pid


def test_after_the_daemon_is_killed_its_worker_leaves_and_the_next_command_works(quire: Quire, client: openai.OpenAI):
    worker = quire.worker()
    os.kill(quire.daemon().pid, signal.SIGKILL)
    worker.wait(10)
    again = quire.run("run", "starter", QUESTION, "--temperature", "0")
    assert again.returncode == 0, again.stderr
    assert "Tokyo" in again.stdout


def test_a_truncated_gguf_is_one_sentence(quire: Quire, starter: InstalledModel, tmp_path: Path):
    broken = tmp_path / "broken.gguf"
    with starter.path.open("rb") as whole:
        broken.write_bytes(whole.read(3_000_000))
    result = quire.run("run", str(broken), "Hello")
    assert result.returncode == 1
    assert result.stdout == ""
    assert "broken.gguf" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_data_root_that_cannot_be_written_is_one_sentence(tmp_path: Path):
    elsewhere = Quire(tmp_path, Path("/proc/quire"))
    result = elsewhere.run("run", "starter", "Hello")
    assert result.returncode == 1
    assert "/proc/quire" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1

"""The daemon serves a directory without weights when it is told to make them up."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.fakes.daemon import running_daemon
from tests.fakes.tiny_model import write_tiny_model


def test_random_weights_need_no_weight_files(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "echo")
    (model / "model.safetensors").unlink()
    body = {"model": str(model), "prompt": "hello", "max_tokens": 5}
    for load_format, status in (("dummy", 200), ("auto", 422)):
        with running_daemon(tmp_path / load_format, QUIRE_LOAD_FORMAT=load_format) as daemon:
            answer = httpx.post(f"{daemon.base_url}/v1/completions", json=body, timeout=30, trust_env=False)
            assert answer.status_code == status, answer.text

"""The benchmark scripts run, count what they say they count, and end in one JSON line."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from benchmarks import offline
from benchmarks.workloads import Request, repeated, shrunk, workload
from tests.fakes.checkpoints import write_hf_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_hf_checkpoint(path, "llama")
    return path


@pytest.mark.parametrize(
    ("name", "checksum"),
    [("single_512_256", 937685283), ("mix256_100-1024", 8726729), ("burst64_512_256", 546718917)],
)
def test_workloads_are_those_that_other_engines_were_measured_on(name: str, checksum: int):
    as_lists = [[list(request.token_ids), request.max_tokens] for request in workload(name)]
    assert zlib.crc32(json.dumps(as_lists).encode()) == checksum


def test_no_repeat_begins_like_another():
    requests = shrunk(workload("mix256_100-1024"), 16)
    runs = [repeated(requests, repeat, 151_936) for repeat in range(20)]
    assert runs[0] == requests
    assert len({request.token_ids[0] for run in runs for request in run[:1]}) == 20
    for run in runs[1:]:
        assert [len(request.token_ids) for request in run] == [len(request.token_ids) for request in requests]
        assert all(10 <= token_id <= 10_000 for request in run for token_id in request.token_ids)


def test_a_small_vocabulary_folds_the_ids():
    (folded,) = repeated([Request((10, 10_000, 5_000), 1)], 3, 320)
    assert all(0 <= token_id < 320 for token_id in folded.token_ids)


def test_offline_reports_every_workload(model: Path, capsys: pytest.CaptureFixture[str]):
    arguments = offline.parse_arguments(
        f"--model {model} --device cpu --load-format dummy --max-num-seqs 8 --shrink 32 --warmup 1 --repeats 2".split()
    )
    result = json.loads(json.dumps(offline.measure_all(arguments)))
    single, prefill = result["workloads"]["single_512_256"], result["workloads"]["prefill_8k"]
    assert (single["prompt_tokens"], single["output_tokens"]) == (16, 8)
    assert single["first_token_ms"] > 0 and single["ms_per_output_token"] > 0
    assert single["output_tokens_per_s"] == pytest.approx(8 / single["total_s"], rel=0.01)
    assert (prefill["requests"], prefill["prompt_tokens"], prefill["output_tokens"]) == (1, 256, 1)
    assert all(workload["cached_tokens"] == 0 for workload in result["workloads"].values())
    assert result["memory"] is None
    assert "mix256_100-1024" in capsys.readouterr().out

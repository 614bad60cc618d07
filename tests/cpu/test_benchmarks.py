"""The benchmark scripts run, count what they say they count, and end in one JSON line."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from benchmarks import check_trace, cold_start, offline, profile, sweep
from benchmarks.steady_decode import DoesNotFit, SteadyDecode
from benchmarks.workloads import Request, repeated, shrunk, workload
from engine import LLM
from engine.api.wire import WorkerFacts
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


def test_cold_start_breaks_the_time_down(model: Path, tmp_path: Path):
    options = f"--load-format dummy --device cpu --kernel-cache {tmp_path} --warm-runs 0 --prompt-len 8"
    arguments = cold_start.parse_arguments(f"--model {model} {options}".split())
    results = cold_start.measure(arguments)
    assert list(results) == ["empty"]
    phases = results["empty"]["phases"]
    assert {"import torch", "import engine", "device init", "allocating the KV cache", "first request"} <= set(phases)
    assert sum(phases.values()) == pytest.approx(results["empty"]["total_s"], rel=0.01)


def test_profile_writes_a_trace_with_its_steps_marked(model: Path, tmp_path: Path):
    trace = tmp_path / "trace.json"
    options = "--load-format dummy --device cpu --batch 3 --context 20 --steps 4 --warmup-steps 2 --max-num-seqs 4"
    result = profile.trace_steps(profile.parse_arguments(f"--model {model} --output {trace} {options}".split()))
    assert result["step_ms"] > 0
    report = check_trace.check(check_trace.read_events(trace), skip_steps=1)
    assert (report.num_steps, report.busy_share, report.violations) == (3, None, ())


def test_sweep_measures_what_fits(model: Path):
    options = "--load-format dummy --device cpu --batches 1,2,4 --contexts 32,64,4096 --steps 2 --warmup-steps 1"
    result = sweep.measure(sweep.parse_arguments(f"--model {model} {options}".split()))
    assert [(cell["batch"], cell["context"]) for cell in result["cells"]] == [
        (batch, context) for batch in (1, 2, 4) for context in (32, 64)
    ]
    assert result["left_out"] == [4096]


def test_sequences_that_do_not_fit_together_are_not_measured_apart(model: Path):
    llm = LLM(model, load_format="dummy", device="cpu", num_kv_blocks=12, max_model_len=64, max_num_seqs=4)
    with pytest.raises(DoesNotFit):
        SteadyDecode(llm, 4, 44, 8, first_id=10**9)
    decode = SteadyDecode(llm, 2, 44, 8, first_id=2 * 10**9)
    assert sorted(decode.step()) == [2 * 10**9, 2 * 10**9 + 1]
    decode.shrink(1)
    assert decode.step() == [2 * 10**9]
    decode.close()
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


FACTS = WorkerFacts(
    architecture="llama", dtype="bfloat16", device="cuda", max_model_len=65536, vocab_size=9, num_parameters=4 * 10**9,
    weight_bytes=8 * 10**9, kv_bytes_per_token=10**5, num_kv_blocks=1, block_size=16, max_num_seqs=256,
)  # fmt: skip


def cells(grow: float, at: tuple[int, int]) -> list[dict[str, Any]]:
    """Jumps of a device that is as fast as the roofline says, but for one cell."""
    expected = {(b, c): sweep.roofline_s(FACTS, b, c, 4.3, 790.0) for b in (64, 128, 256) for c in (1024, 2048, 4096)}
    times = {cell: 1000 * seconds * (grow if cell == at else 1.0) for cell, seconds in expected.items()}
    return sweep.find_jumps(times, expected, 1.4)


def test_growth_that_the_bytes_explain_is_no_jump() -> None:
    assert cells(1.0, (64, 1024)) == []
    assert cells(1.35, (128, 2048)) == []


def test_a_jump_is_seen_along_both_axes() -> None:
    found = [(jump["from"], jump["to"]) for jump in cells(1.5, (128, 2048))]
    assert found == [((64, 2048), (128, 2048)), ((128, 1024), (128, 2048))]


def test_a_drop_is_no_jump_but_the_way_back_is() -> None:
    assert [jump["to"] for jump in cells(0.5, (128, 2048))] == [(256, 2048), (128, 4096)]

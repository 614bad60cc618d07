"""The comparison with llama.cpp counts what it says it counts, and its contenders answer.

llama.cpp itself is looked for in this interpreter, or in the one that QUIRE_LLAMA_PYTHON names.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader

from benchmarks import make_gguf, perplexity, vs_llamacpp
from benchmarks.llamacpp import bench_binary, server_child
from benchmarks.llamacpp.child import Child, ChildFailed
from benchmarks.llamacpp.report import Row, spread_percent, table
from benchmarks.llamacpp.tasks import decode_rate, overall_rate, parse_task
from engine import LLM
from tests.fakes.teacher import Teacher

LLAMA_PYTHON = os.environ.get("QUIRE_LLAMA_PYTHON", sys.executable)
SHAPE = make_gguf.SHAPES["tiny"]


def llama_is_missing() -> bool:
    return subprocess.run([LLAMA_PYTHON, "-c", "import llama_cpp"], capture_output=True).returncode != 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    make_gguf.write(path, SHAPE, "Q4_1", None)
    return path


def test_decode_is_counted_while_all_sequences_decode():
    assert decode_rate([[1.0, 2.0, 3.0, 4.0]]) == 1.0
    # The second sequence starts as the first has two tokens; what each does alone is left out.
    assert decode_rate([[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0, 6.0]]) == 2.0
    assert overall_rate([[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0, 6.0]]) == 1.5
    with pytest.raises(ValueError, match="never decoded together"):
        decode_rate([[1.0, 2.0], [2.0, 3.0]])


def test_a_task_says_what_it_measures():
    prompt, first = parse_task("prompt_512"), parse_task("first_token_1000")
    assert (prompt.num_sequences, prompt.prompt_tokens, prompt.max_tokens, prompt.unit) == (1, 512, 1, "tok/s")
    assert prompt.figure([[2.0]]) == 256.0
    assert (first.figure([[2.0]]), first.unit) == (2.0, "s")
    several = parse_task("generate_4", generate_prompt_tokens=8, generate_tokens=3)
    assert [(len(request.token_ids), request.max_tokens) for request in several.requests(0, 320)] == [(8, 3)] * 4
    assert several.requests(0, 320) == several.requests(0, 320) != several.requests(1, 320)
    assert several.length == 11


@pytest.mark.parametrize("name", ["generate_0", "decode_4", "prompt_512x", ""])
def test_what_is_no_task_is_refused(name: str):
    with pytest.raises(ValueError, match="is no task"):
        parse_task(name)


def test_ratios_are_of_medians_and_know_which_way_is_better():
    faster = Row("generate_16", "tok/s", (900.0, 300.0, 320.0), (100.0, 100.0, 200.0))
    assert (faster.ratio, faster.best_ratio, faster.paired_ratios) == (3.2, 4.5, [9.0, 3.0, 1.6])
    assert (faster.verdict, spread_percent(faster.llamacpp)) == ("must", 100.0)
    assert Row("load", "s", (2.0, 3.0), (2.0, 2.0)).verdict == "must"
    assert Row("load", "s", (1.0, 3.0), (2.0, 2.0)).best_ratio == 0.5
    assert Row("load", "s", (4.0,), (2.0,)).verdict == "short"
    assert Row("generate_1", "tok/s", (130.0,), (100.0,)).verdict == "aim"
    assert Row("generate_2", "tok/s", (130.0,), (100.0,)).verdict == ""
    header, line = table([faster]).splitlines()
    assert " ".join(line.split()) == "generate_16 tok/s 320 94 100 50 3.20 1.60-9.00 4.50 ≥ 3 ≥ 5 must"
    assert "llama.cpp" in header
    assert json.loads(json.dumps(faster.as_json()))["best_ratio"] == 4.5


def test_a_cache_filled_later_does_not_make_an_earlier_peak_smaller():
    usages: list[dict[str, float]] = [{"peak_bytes": 900, "kv_bytes": 0}, {"peak_bytes": 1000, "kv_bytes": 300}]
    assert vs_llamacpp.memory(usages) == {"peak_bytes": 1000, "beyond_kv_bytes": 900, "kv_bytes": 300}


def test_quire_answers_as_a_child(model: Path, tmp_path: Path):
    with Child(sys.executable, "benchmarks.llamacpp.quire_child", {"QUIRE_HOME": str(tmp_path)}) as child:
        loaded = child.ask("load", model=str(model), threads=1, shapes=[[1, 40], [3, 24]])
        before = child.ask("usage")
        arrivals = child.ask("run", prompts=[[1] * 8, [2] * 8, [3] * 20], max_tokens=4)
        after = child.ask("usage")
    assert loaded["vocab_size"] == SHAPE.vocab_size
    assert loaded["load_s"] > 0 < loaded["import_s"]
    assert [len(times) for times in arrivals] == [4, 4, 4]
    assert all(times == sorted(times) and times[0] > 0 for times in arrivals)
    assert after["peak_bytes"] >= before["peak_bytes"] > 2**20
    # 12 + 12 + 24 tokens in blocks of 16.
    assert after["kv_bytes"] == 4 * 16 * loaded["details"]["kv_bytes_per_token"]


def test_a_child_that_fails_says_why(tmp_path: Path):
    with (
        Child(sys.executable, "benchmarks.llamacpp.quire_child") as child,
        pytest.raises(ChildFailed, match="nothing-here"),
    ):
        child.ask("load", model=str(tmp_path / "nothing-here"), threads=1, shapes=[[1, 32]])
    with pytest.raises(ChildFailed, match="cannot be started"):
        Child("/nowhere/python", "benchmarks.llamacpp.quire_child")


@pytest.mark.skipif(llama_is_missing(), reason=f"{LLAMA_PYTHON} has no llama_cpp; set QUIRE_LLAMA_PYTHON")
def test_both_take_turns(model: Path, capsys: pytest.CaptureFixture[str]):
    options = "--threads 1 --repeats 2 --load-repeats 1 --tasks prompt_16,generate_2 --prompt-tokens 8"
    arguments = vs_llamacpp.parse_arguments(
        f"--model {model} --llama-python {LLAMA_PYTHON} --generate-tokens 6 {options}".split()
    )
    result = json.loads(json.dumps(vs_llamacpp.measure(arguments)))
    rows = result["rows"]
    assert set(result["idle_cpu_share"]) == {"quire", "llamacpp"}
    assert 0 <= result["others_cpu_share"]["median"] <= result["others_cpu_share"]["max"]
    assert {"prompt_16", "generate_2", "load", "peak memory", "peak memory beyond KV"} <= set(rows)
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["quire_median"] / row["llamacpp_median"], rel=0.01)
    # 16 sequences of 256 tokens, keys and values of float16.
    values = 16 * 256 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim
    assert result["loads"]["llamacpp"][0]["kv_bytes"] == pytest.approx(2 * values * 2, rel=0.01)
    assert "repeat 2: generate_2, quire" in capsys.readouterr().out


FAKE_SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200 if body["ignore_eos"] and body["prompt"][0] != 7 else 400)
        self.end_headers()
        events = [{{"tokens": [1]}}] * (body["n_predict"] - 1) + [{{"stop": True, "tokens": []}}]
        for event in events:
            self.wfile.write(f"data: {{json.dumps(event)}}\\n\\n".encode())
    def log_message(self, *arguments):
        pass

print("print_info: n_vocab = 320\\nllama_kv_cache: CPU KV buffer size = 1.50 MiB", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[server_child.Contender, dict[str, object]]]:
    binary = tmp_path / "llama-server"
    binary.write_text(FAKE_SERVER.format(python=sys.executable))
    binary.chmod(0o755)
    contender = server_child.Contender()
    yield contender, contender.load("m.gguf", 2, [[1, 300], [4, 40]], server=str(binary))
    contender.close()


def test_a_server_is_asked_over_http(server: tuple[server_child.Contender, dict[str, object]]):
    contender, loaded = server
    assert loaded["vocab_size"] == 320
    # The last token's character never ended, so that it had no event of its own.
    arrivals = contender.run([[1, 2], [3, 4]], 5)
    assert [len(times) for times in arrivals] == [5, 5]
    used = contender.usage()
    assert used["kv_bytes"] == 1.5 * 2**20
    assert used["peak_bytes"] > 2**20 and used["cpu_s"] >= 0
    with pytest.raises(RuntimeError, match="answered 400"):
        contender.run([[7]], 5)


def test_binaries_are_given_the_same_work():
    command = server_child.command_line("s", "m.gguf", 2, [[1, 300], [4, 40]], 99)
    assert command[command.index("-c") + 1] == str(4 * 512)
    assert command[command.index("-np") + 1] == "4"
    prompt, generate = parse_task("prompt_512"), parse_task("generate_1")
    assert " ".join(bench_binary.command_line("b", "m", 2, prompt)) == "b -m m -t 2 -p 512 -n 0 -r 1 -o json"
    assert " ".join(bench_binary.command_line("b", "m", 2, generate)) == "b -m m -t 2 -p 0 -n 128 -r 1 -o json"
    assert bench_binary.parse('[{"n_prompt": 512, "avg_ts": 172.5}]') == 172.5
    with pytest.raises(ValueError, match="did not report"):
        bench_binary.parse("[]")
    names = ("prompt_512", "generate_1", "generate_4", "first_token_9")
    assert [bench_binary.can_measure(parse_task(name)) for name in names] == [True, True, False, False]


def test_a_tokenizer_is_copied_and_padded(model: Path, tmp_path: Path):
    wider = make_gguf.Shape("qwen2", 1, 64, 64, 2, 1, 32, 400)
    make_gguf.write(tmp_path / "wider.gguf", wider, "Q8_0", model)
    fields = GGUFReader(tmp_path / "wider.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(set(tokens)) == 400 and tokens[:3] == ["<|end|>", make_gguf.byte_symbol(0), make_gguf.byte_symbol(1)]
    assert LLM(tmp_path / "wider.gguf", device="cpu", max_model_len=64).facts.vocab_size == 400
    with pytest.raises(ValueError, match="more than the shape's 100"):
        make_gguf.write(tmp_path / "narrow.gguf", make_gguf.Shape("llama", 1, 64, 64, 2, 1, 32, 100), "F16", model)


def test_every_byte_has_its_own_symbol():
    assert len({make_gguf.byte_symbol(byte) for byte in range(256)}) == 256
    assert [make_gguf.byte_symbol(byte) for byte in (ord("a"), ord(" "), ord("\n"))] == ["a", "Ġ", "Ċ"]


def test_perplexity_is_the_exponential_of_the_mean():
    assert perplexity.perplexity([math.log(0.5), math.log(0.125)]) == pytest.approx(4.0)
    assert [len(piece) for piece in perplexity.windows(range(21), 10)] == [10, 10]


def test_scores_are_the_models_own(model: Path):
    token_ids = torch.randint(300, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    llm = LLM(model, device="cpu", dtype="float32", quantization="none", max_model_len=64, max_num_seqs=8)
    found = perplexity.Scorer(llm).logprobs(token_ids)
    teacher = Teacher(model, device=torch.device("cpu"), dtype=torch.float32, max_len=64)
    (expected,) = teacher.logprobs([token_ids], chunk=64)
    wanted = expected[:-1].gather(1, torch.tensor(token_ids[1:])[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-4, atol=1e-4)


def test_perplexity_compares_ways_of_loading(model: Path):
    arguments = perplexity.parse_arguments(
        f"--model {model} --quantization none,none --window 32 --max-tokens 70".split()
    )
    results = perplexity.measure(arguments)
    assert results["none"]["scored_tokens"] == 31 + 31 + 5
    assert results["none"]["ratio_to_none"] == 1.0
    assert 1.0 < results["none"]["perplexity"] < 100_000

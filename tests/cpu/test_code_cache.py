"""Compiled kernels on disk: later starts load no compiler, and no file can do harm."""

from __future__ import annotations

import inspect
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.cpu import catalogue, code_cache
from engine.cpu.activations import splits_floats
from engine.cpu.attention_shape import AttentionShape
from engine.cpu.code_cache import FOLDER_VARIABLE, ObjectCode, kernel_address
from engine.cpu.code_image import CodeImage
from engine.cpu.elf_object import Unlinkable
from engine.cpu.isa import choose_isa, describe_processor, host_cpu, host_isa
from engine.cpu.kernel import Body, Kernel
from tests.fakes.checkpoints import write_gguf_checkpoint, write_hf_checkpoint, write_tokenizer

LINKS_ITSELF = sys.platform.startswith("linux") and platform.machine() == "x86_64"
REPOSITORY = Path(__file__).resolve().parents[2]
GENERATE = """
import sys
from engine import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", max_model_len=128, max_num_seqs=2)
prompts = [{"prompt_token_ids": list(range(5, 40))}, {"prompt_token_ids": [7, 8]}]
outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
print([output.outputs[0].token_ids for output in outputs])
print([name for name in ("numba", "llvmlite") if name in sys.modules])
"""


def start(model: Path, home: Path) -> subprocess.Popen[str]:
    """An engine in a process of its own, which says what it generates and what it has loaded of the compiler."""
    environ = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE}
    command = [sys.executable, "-c", GENERATE, str(model)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=REPOSITORY, env={**environ, "QUIRE_HOME": str(home)}, text=True, **pipes)  # type: ignore[call-overload]


def answer(process: subprocess.Popen[str]) -> tuple[str, str]:
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    tokens, loaded = stdout.splitlines()
    return tokens, loaded


COMPILER = "['numba', 'llvmlite']"
WARM = "[]" if LINKS_ITSELF else "['llvmlite']"


def test_later_starts_load_no_compiler_and_say_the_same(tmp_path: Path) -> None:
    """After two first starts at once, on an empty cache."""
    write_hf_checkpoint(tmp_path, "llama")
    write_tokenizer(tmp_path)
    model, home = tmp_path / "model.gguf", tmp_path / "home"
    write_gguf_checkpoint(model, tmp_path, "Q4_0")
    first = [start(model, home) for _ in range(2)]
    (tokens, loaded), other = (answer(process) for process in first)
    assert (tokens, loaded) == other
    assert loaded == COMPILER
    assert answer(start(model, home)) == (tokens, WARM)
    kernels = sorted(home.rglob("*.code"))
    assert len(kernels) > 10
    assert not list(home.rglob("*.tmp"))
    for path in kernels[-3:]:
        path.write_bytes(path.read_bytes()[:-100])
    assert answer(start(model, home)) == (tokens, COMPILER)
    assert answer(start(model, home)) == (tokens, WARM)


SHAPE = AttentionShape(64, 3, 28)
KERNELS = {
    "matrix_kernel": [(4, False), (4, True), (8, False), (8, True)],
    "norm_pack_kernel": [()],
    "pack_kernel": [()],
    "gate_pack_kernel": [()],
    "embed_packed_kernel": [(4, False), (4, True), (8, False), (8, True)],
    "float_matrix_kernel": [(0,), (1,), (2,)],
    "norm_floats_kernel": [()],
    "plain_floats_kernel": [()],
    "gate_floats_kernel": [()],
    "embed_floats_kernel": [(0,), (1,), (2,)],
    "gather_kernel": [(16,)],
    "rotation_kernel": [()],
    "add_kernel": [()],
    "select_rows_kernel": [()],
    "likeliest_kernel": [()],
    "plan_kernel": [(4,)],
    "store_kernel": [(64, 16, 2, False), (64, 16, 4, True)],
    "attention_kernel": [(SHAPE, 16, 2), (SHAPE, 16, 4)],
    "gelu_floats_kernel": [()],
    "layer_norm_kernel": [()],
    "embed_norm_kernel": [()],
    "float_attention_kernel": [(32,), (64,)],
    "split_matrix_kernel": [(False,), (True,)] if splits_floats() else [],
    "split_attention_kernel": [(32,), (64,)] if splits_floats() else [],
    "pool_kernel": [(0,), (1,), (2,)],
    "lead_kernel": [()],
    "join_kernel": [()],
}


def test_every_kernel_of_the_catalogue_is_tried() -> None:
    functions = {name for name, value in vars(catalogue).items() if inspect.isfunction(value)}
    assert {name for name in functions if name.endswith("_kernel")} == set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_can_be_kept(name: str) -> None:
    """It refers to nothing that a process without numba lacks, and where we can link, LLVM need not."""
    folder, identity = Path(os.environ[FOLDER_VARIABLE]), code_cache._identity()
    for choice in KERNELS[name]:
        kernel = getattr(catalogue, name)(*choice)
        assert kernel_address(kernel, None) != 0
        path = code_cache._place(kernel, folder, identity)
        assert isinstance(code_cache._read(path, identity), CodeImage if LINKS_ITSELF else ObjectCode)
        for prefix in (b"NRT_", b"numba_", b"PyErr_", b"PyExc_", b"Py_", b"PyUnicode_"):
            assert prefix not in path.read_bytes()


ADD = Kernel("engine.cpu.row_kernels", "add")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache."""
    monkeypatch.delenv(FOLDER_VARIABLE)
    return tmp_path / "code"


def load(kernel: Kernel, folder: Path | None) -> int:
    """As a new process would, where nothing is loaded yet."""
    return code_cache._loaded.__wrapped__(kernel, folder).address


@pytest.mark.parametrize("damage", [lambda code: b"", lambda code: code[:40], lambda code: code[:-1] + b"?"])
def test_a_damaged_file_is_written_again(damage, folder: Path) -> None:  # type: ignore[no-untyped-def]
    load(ADD, folder)
    (path,) = folder.rglob("*.code")
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert load(ADD, folder) != 0
    assert path.read_bytes() == good


def test_code_of_another_processor_or_version_is_not_read(folder: Path) -> None:
    load(ADD, folder)
    (path,) = folder.rglob("*.code")
    identity = code_cache._identity()
    assert code_cache._read(path, identity) is not None
    assert code_cache._read(path, identity + b"+") is None
    assert describe_processor().encode() in identity


def test_the_processor_can_be_narrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = describe_processor()
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert (host_cpu.__wrapped__().name, host_cpu.__wrapped__().features) == ("generic", "")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2")
    assert host_cpu.__wrapped__().features == "+avx2"
    assert describe_processor.__wrapped__() != own


def test_the_system_says_of_the_processor_what_llvm_says() -> None:
    names = {entry[1:] for entry in host_cpu().features.split(",") if entry.startswith("+")}
    assert host_isa() == choose_isa(platform.machine(), frozenset(names))


@pytest.mark.parametrize(
    "code",
    [ObjectCode(b"no object code"), CodeImage(b"\xc3" + bytes(15), 0, (), (("no_such_symbol", 8),))],
)
def test_code_that_cannot_be_loaded_is_compiled_again(
    code: code_cache.Code, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(ADD, folder)
    (path,) = folder.rglob("*.code")
    good = path.read_bytes()
    code_cache._write(path, code_cache._identity(), msgspec.msgpack.encode(code))
    with caplog.at_level(logging.WARNING):
        assert load(ADD, folder) != 0
    assert "compiled again" in caplog.text
    assert path.read_bytes() == good


def test_llvm_links_what_we_cannot(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(content: bytes, entry: str) -> CodeImage:
        raise Unlinkable("a test")

    monkeypatch.setattr(code_cache, "link_object", refuse)
    first = load(ADD, folder)
    (path,) = folder.rglob("*.code")
    assert isinstance(code_cache._read(path, code_cache._identity()), ObjectCode)
    assert load(ADD, folder) not in (0, first)
    assert not caplog.records


def test_a_folder_that_cannot_be_written_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert load(ADD, folder) != 0
        assert load(Kernel("engine.cpu.row_kernels", "select_rows"), folder) != 0
    assert caplog.text.count("cannot be kept") == 1


def test_no_folder_is_fine(folder: Path) -> None:
    assert load(ADD, None) != 0
    assert not folder.exists()


def raising() -> Body:
    """Refers to numba's ways of reporting an error."""

    def kernel(arguments, step, rank, size):  # type: ignore[no-untyped-def]
        if arguments == 1:
            raise ValueError("an error")

    return kernel


def test_a_kernel_that_needs_numba_works_and_is_not_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert load(Kernel(__name__, "raising"), folder) != 0
    assert "numba_gil_ensure" in caplog.text
    assert not list(folder.rglob("*.code"))

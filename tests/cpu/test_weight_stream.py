"""Streamed weights equal the files bit for bit, whatever the piece size; a bad file leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.api.errors import BrokenCheckpoint
from engine.layers.weight_slot import CopySlot
from engine.loading.checkpoint import open_checkpoint
from engine.loading.loader import load_model
from engine.loading.read_plan import StoredTensor, plan_pieces
from engine.loading.staging import Staging, staging_for
from engine.loading.weight_stream import stream_tensors
from engine.models.decoder import DecoderModel
from tests.fakes.checkpoints import write_gguf_checkpoint, write_hf_checkpoint

CPU = torch.device("cpu")


class WatchedStaging(Staging):
    """Small pieces through few buffers; keeps what the tests look at."""

    def __init__(self, piece_bytes: int = 1000, num_buffers: int = 3) -> None:
        super().__init__(CPU, piece_bytes=piece_bytes, num_buffers=num_buffers)
        self.buffers: list[torch.Tensor] = []
        self.num_fences = 0
        self.num_waits = 0

    def new_buffer(self, num_bytes: int) -> torch.Tensor:
        self.buffers.append(super().new_buffer(num_bytes))
        return self.buffers[-1]

    def fence(self) -> Callable[[], None]:
        self.num_fences += 1
        return self._wait

    def _wait(self) -> None:
        self.num_waits += 1

    @property
    def is_clean(self) -> bool:
        """No memory held and no thread left."""
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("weight-reader")]
        return not threads and all(buffer.untyped_storage().nbytes() == 0 for buffer in self.buffers)


def load(path: Path, staging: Staging | None, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return load_model(
        open_checkpoint(path), device=CPU, dtype=dtype, on_progress=lambda done, total: None, staging=staging
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_hf_checkpoint(tmp_path, "llama")
    return tmp_path


@given(
    files=st.lists(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 1)), max_size=8), max_size=3),
    piece_bytes=st.integers(1, 64),
)
def test_pieces_hold_every_byte_once_in_order(files: list[list[tuple[int, int]]], piece_bytes: int) -> None:
    tensors = []
    for index, sizes in enumerate(files):
        offset = 8
        for num_bytes, gap in sizes:
            offset += gap
            name = str(len(tensors))
            tensors.append(StoredTensor(name, Path(str(index)), offset, num_bytes, torch.uint8, (num_bytes,)))
            offset += num_bytes
    pieces = plan_pieces(tensors, piece_bytes)
    read = [
        (part.tensor.name, piece.path, piece.offset + part.position + index, part.start + index)
        for piece in pieces
        for part in piece.parts
        for index in range(part.num_bytes)
    ]
    assert read == [
        (tensor.name, tensor.path, tensor.offset + index, index)
        for tensor in tensors
        for index in range(tensor.num_bytes)
    ]
    for piece in pieces:
        assert piece.num_bytes == sum(part.num_bytes for part in piece.parts) <= piece_bytes
        assert piece.num_bytes > 0 or piece.parts
    finished = [part.tensor.name for piece in pieces for part in piece.parts if part.is_last]
    assert finished == [tensor.name for tensor in tensors]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["same", "converted"])
def test_streamed_weights_equal_mapped_ones(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    write_hf_checkpoint(tmp_path, family, max_shard_size="60KB")
    staging = WatchedStaging()
    mapped, streamed = load(tmp_path, None, dtype), load(tmp_path, staging, dtype)
    for (name, left), right in zip(mapped.named_parameters(), streamed.parameters(), strict=True):
        assert torch.equal(left, right), name
    assert streamed.missing_weights() == []
    assert staging.is_clean
    assert 1 <= len(staging.buffers) <= 3
    assert staging.num_waits > 0


@pytest.mark.parametrize("piece_bytes", [1, 7, 4096, 2**20])
def test_any_piece_size_and_any_alignment(tmp_path: Path, piece_bytes: int) -> None:
    path = tmp_path / "values"
    values = torch.arange(300, dtype=torch.float32)
    path.write_bytes(b"odd" + values.numpy().tobytes() + b"-" + values[:1].numpy().tobytes())
    stored = [
        StoredTensor("matrix", path, 3, 1200, torch.float32, (30, 10)),
        StoredTensor("empty", path, 1203, 0, torch.float32, (0, 4)),
        StoredTensor("scalar", path, 1204, 4, torch.float32, ()),
    ]
    sent: list[int] = []
    with (
        Staging(CPU, piece_bytes=piece_bytes, num_buffers=2) as staging,
        closing(stream_tensors(stored, staging, landing=lambda tensor: None, on_bytes=sent.append)) as tensors,
    ):
        got = {tensor.name: target.clone() for tensor, target in tensors}
    assert torch.equal(got["matrix"], values.view(30, 10))
    assert got["empty"].shape == (0, 4)
    assert torch.equal(got["scalar"], values[0])
    assert sent[-1] == 1204
    assert sent == sorted(sent)


def test_nothing_to_stream_is_fine() -> None:
    with Staging(CPU) as staging:
        assert list(stream_tensors([], staging, landing=lambda tensor: None)) == []


def test_a_slot_offers_its_own_memory_only_where_nothing_is_left_to_do() -> None:
    parameter = torch.zeros(6, 4)
    slot = CopySlot(parameter.narrow(0, 2, 3))
    landing = slot.landing(torch.float32)
    assert landing is not None
    landing.fill_(1.0)
    slot.load(landing)
    assert parameter.sum() == 12
    assert slot.landing(torch.bfloat16) is None
    assert CopySlot(parameter.t()).landing(torch.float32) is None


def test_progress_is_in_bytes_and_ends_at_the_total(directory: Path) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(directory)
    load_model(
        checkpoint,
        device=CPU,
        dtype=torch.float32,
        on_progress=lambda done, total: seen.append((done, total)),
        staging=WatchedStaging(),
    )
    assert seen[0] == (0, checkpoint.num_bytes)
    assert seen[-1] == (checkpoint.num_bytes, checkpoint.num_bytes)
    assert seen == sorted(seen)


def test_what_the_model_ignores_is_not_read(tmp_path: Path) -> None:
    write_hf_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": torch.zeros_like(tensors["model.embed_tokens.weight"])}, path)
    checkpoint, seen = open_checkpoint(tmp_path), [(0, 0)]
    load_model(
        checkpoint,
        device=CPU,
        dtype=torch.float32,
        on_progress=lambda done, total: seen.append((done, total)),
        staging=WatchedStaging(),
    )
    assert seen[-1][1] == checkpoint.num_bytes - tensors["model.embed_tokens.weight"].nbytes


def test_a_file_that_ends_early_is_named_and_nothing_is_left(directory: Path) -> None:
    path = directory / "model.safetensors"
    checkpoint, staging = open_checkpoint(directory), WatchedStaging()
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(BrokenCheckpoint, match=r"model\.safetensors ends in the middle.*pull the model again\.$"):
        load_model(checkpoint, device=CPU, dtype=torch.float32, on_progress=lambda *_: None, staging=staging)
    assert staging.is_clean


def test_a_file_that_cannot_be_read_is_named_and_nothing_is_left(directory: Path) -> None:
    path = directory / "model.safetensors"
    checkpoint, staging = open_checkpoint(directory), WatchedStaging()
    path.unlink()
    path.mkdir()
    with pytest.raises(BrokenCheckpoint, match=r"model\.safetensors cannot be read \(Is a directory\)"):
        load_model(checkpoint, device=CPU, dtype=torch.float32, on_progress=lambda *_: None, staging=staging)
    assert staging.is_clean


def test_a_refused_tensor_leaves_nothing_behind(directory: Path) -> None:
    path = directory / "model.safetensors"
    save_file({**load_file(path), "model.layers.0.input_layernorm.weight": torch.ones(65)}, path)
    staging = WatchedStaging(num_buffers=16)
    with pytest.raises(BrokenCheckpoint, match=r"\(65,\).*\(64,\)"):
        load(directory, staging)
    assert staging.is_clean


def test_a_cpu_keeps_the_memory_map_and_quantised_files_are_decoded(directory: Path, tmp_path: Path) -> None:
    assert staging_for(CPU) is None
    gguf = tmp_path / "model.gguf"
    write_gguf_checkpoint(gguf, directory, "Q8_0")
    staging = WatchedStaging()
    assert load(gguf, staging).missing_weights() == []
    assert staging.buffers == []

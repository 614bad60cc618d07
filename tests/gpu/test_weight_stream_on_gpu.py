"""Weights streamed to a GPU equal those of the memory map, and leave no pinned memory behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.api.errors import BrokenCheckpoint
from engine.loading.checkpoint import open_checkpoint
from engine.loading.loader import load_model
from engine.loading.staging import CudaStaging
from tests.fakes.checkpoints import write_hf_checkpoint

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["same", "converted"])
@pytest.mark.parametrize("piece_bytes", [1000, 2**20])
def test_streamed_weights_equal_mapped_ones(tmp_path: Path, dtype: torch.dtype, piece_bytes: int):
    write_hf_checkpoint(tmp_path, "qwen3", max_shard_size="60KB")
    models = [
        load_model(
            open_checkpoint(tmp_path),
            device=device,
            dtype=dtype,
            on_progress=lambda done, total: None,
            staging=CudaStaging(GPU, piece_bytes=piece_bytes, num_buffers=3) if device == GPU else None,
        )
        for device in (CPU, GPU)
    ]
    for (name, mapped), streamed in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mapped, streamed.cpu()), name


@pytest.mark.gpu
def test_a_bad_file_frees_the_pinned_memory(tmp_path: Path):
    write_hf_checkpoint(tmp_path, "llama")
    checkpoint, staging = open_checkpoint(tmp_path), CudaStaging(GPU, piece_bytes=4096, num_buffers=3)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])
    pinned_bytes = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    with pytest.raises(BrokenCheckpoint, match="ends in the middle"):
        load_model(checkpoint, device=GPU, dtype=torch.float32, on_progress=lambda *_: None, staging=staging)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= pinned_bytes
    assert torch.cuda.current_stream() == torch.cuda.default_stream()

"""Compiled kernels go under the data root, apart by device and version; a bad place never stops an engine."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.runner import kernel_cache
from engine.runner.kernel_cache import cache_key, use_kernel_cache

CPU = torch.device("cpu")


def test_the_key_is_a_plain_folder_name_of_device_and_versions() -> None:
    key = cache_key("NVIDIA H200 / MIG 1g", "3.6.0", "2.11.0+cu130")
    assert key == "NVIDIA-H200-MIG-1g-triton-3.6.0-torch-2.11.0+cu130"
    assert key != cache_key("NVIDIA H200 / MIG 1g", "3.7.0", "2.11.0+cu130")


def test_a_given_directory_replaces_what_the_environment_says(tmp_path: Path) -> None:
    environ = {"TRITON_CACHE_DIR": "/elsewhere", "PATH": "/bin"}
    folder = use_kernel_cache(tmp_path / "kernels", CPU, environ)
    assert folder is not None
    assert folder.parent == tmp_path / "kernels"
    assert torch.__version__ in folder.name
    assert environ == {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "CUDA_CACHE_PATH": str(tmp_path / "kernels" / "cuda"),
        "PATH": "/bin",
    }
    assert list(folder.iterdir()) == []


def test_without_a_directory_the_data_root_serves_and_the_user_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))
    environ = {"TRITON_CACHE_DIR": "/elsewhere"}
    folder = use_kernel_cache(None, CPU, environ)
    assert folder is not None
    assert folder.parent == tmp_path / "kernels"
    assert environ == {"TRITON_CACHE_DIR": "/elsewhere", "CUDA_CACHE_PATH": str(tmp_path / "kernels" / "cuda")}


def test_without_the_store_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "_default_directory", lambda: None)
    environ: dict[str, str] = {}
    assert use_kernel_cache(None, CPU, environ) is None
    assert environ == {}


@pytest.mark.parametrize("trouble", ["not a directory", "the disk is full"])
def test_an_unusable_directory_costs_one_warning(
    trouble: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "kernels"
    if trouble == "the disk is full":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    else:
        directory.touch()
    environ: dict[str, str] = {}
    with caplog.at_level(logging.WARNING):
        folder = use_kernel_cache(directory, CPU, environ)
    assert folder is not None
    assert folder.is_dir()
    assert tmp_path not in folder.parents
    assert environ == {"TRITON_CACHE_DIR": str(folder / "triton"), "CUDA_CACHE_PATH": str(folder / "cuda")}
    (record,) = caplog.records
    assert str(directory) in record.getMessage()
    assert trouble in record.getMessage()


def test_no_place_to_write_at_all_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(kernel_cache, "_temporary_directory", lambda: None)
    environ: dict[str, str] = {}
    assert use_kernel_cache(tmp_path / "file", CPU, environ) is None
    assert environ == {}

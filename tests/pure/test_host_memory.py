"""RAM as a container lets it be used."""

from __future__ import annotations

from pathlib import Path

from engine.host_memory import available_host_bytes, container_memory, host_memory


def write_group(cgroup: Path, *, limit: str, usage: int, **stat: int) -> None:
    (cgroup / "memory.max").write_text(f"{limit}\n")
    (cgroup / "memory.current").write_text(f"{usage}\n")
    (cgroup / "memory.stat").write_text("".join(f"{key} {value}\n" for key, value in stat.items()))


def test_file_pages_are_left_out_of_what_a_container_uses(tmp_path: Path) -> None:
    write_group(tmp_path, limit="1000", usage=600, anon=100, inactive_file=200, active_file=50)
    assert container_memory(tmp_path) == host_memory(tmp_path) == (1000, 350)
    assert available_host_bytes(tmp_path) == 650


def test_a_full_container_has_nothing_left(tmp_path: Path) -> None:
    write_group(tmp_path, limit="1000", usage=1100)
    assert available_host_bytes(tmp_path) == 0


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    assert container_memory(tmp_path) is None
    write_group(tmp_path, limit="max", usage=600)
    assert container_memory(tmp_path) is None
    total, used = host_memory(tmp_path)
    assert 0 < used < total
    assert 0 < available_host_bytes(tmp_path) < total


def test_a_container_larger_than_the_machine_limits_nothing(tmp_path: Path) -> None:
    write_group(tmp_path, limit=str(1 << 60), usage=600)
    assert host_memory(tmp_path)[0] < 1 << 60
    assert available_host_bytes(tmp_path) < 1 << 59

"""Which CPUs compute: cores, hardware threads and the quotas of control groups, from files as Linux has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.runner.cpus import CpuShare, cgroup_quota, cpu_share, one_per_core


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_two_hardware_threads_of_a_core_count_once(tmp_path):
    for cpu, siblings in enumerate(("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")):
        write(tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list", siblings)
    assert one_per_core([0, 1, 4, 5, 6], tmp_path) == (0, 1, 6)


def test_without_topology_every_cpu_counts(tmp_path):
    assert one_per_core([0, 3], tmp_path) == (0, 3)


@pytest.mark.parametrize(
    ("limits", "quota"),
    [
        ({"": "max 100000"}, None),
        ({"a/b": "150000 100000"}, 1.5),
        ({"a": "200000 100000", "a/b": "max 100000"}, 2.0),
        ({"a": "100000 100000", "a/b": "400000 100000"}, 1.0),
        ({"a/b": "nonsense"}, None),
        ({}, None),
    ],
)
def test_the_tightest_quota_of_a_group_and_those_above_it_counts(tmp_path, limits, quota):
    for group, text in limits.items():
        write(tmp_path / group / "cpu.max", text)
    assert cgroup_quota(tmp_path, "/a/b") == quota


def test_a_quota_of_the_older_kind(tmp_path):
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", "250000")
    write(tmp_path / "cpu" / "cpu.cfs_period_us", "100000")
    assert cgroup_quota(tmp_path, "") == 2.5
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", "-1")
    assert cgroup_quota(tmp_path, "") is None


@pytest.mark.parametrize(
    ("cores", "quota", "threads"), [((0, 1), None, 2), ((0, 1, 2), 2.5, 2), ((0,), 4.0, 1), ((0, 1), 0.5, 1)]
)
def test_threads_never_exceed_cores_or_quota(cores, quota, threads):
    assert CpuShare(cores, quota).threads == threads


def test_this_machine_has_at_least_one_thread():
    assert cpu_share().threads >= 1

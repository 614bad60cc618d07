"""Which disks are offered, and which one is preselected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from store.disk.filesystems import (
    Disk,
    Mount,
    folder_on,
    is_real_choice,
    is_rotational,
    preselected,
    read_disks,
    roomier_disk,
    usable_mounts,
)
from store.known_roots import mount_of
from store.paths import DataRoot, platform_data_root

GB = 10**9
ROOT = Path("/")


def mount(path: str, fs_type: str = "ext4", device: str = "", is_read_only: bool = False) -> Mount:
    return Mount(Path(path), device or f"/dev{path}", fs_type, is_read_only)


def disk(path: str, free_gb: float, **changes: object) -> Disk:
    plain = Disk(Path(path), "ext4", int(free_gb * GB), 4000 * GB, Path(path, "quire"), is_home=path == "/")
    return replace(plain, **changes)


@pytest.mark.parametrize(
    "unusable",
    [
        mount("/dev/shm", "tmpfs"),
        mount("/run/lock", "tmpfs"),
        mount("/mnt/ram", "tmpfs"),
        mount("/var/lib/docker/overlay2/x/merged", "overlay", "overlay"),
        mount("/mnt/layer", "overlay", "overlay"),
        mount("/boot"),
        mount("/boot/efi", "vfat"),
        mount("/snap/core/1", "squashfs"),
        mount("/snap/data"),
        mount("/mnt/dvd", "iso9660"),
        mount("/mnt/backup", is_read_only=True),
        mount("/etc/hosts"),
        mount("/proc", "proc", "proc"),
    ],
    ids=lambda mount: f"{mount.path} {mount.fs_type}",
)
def test_what_is_no_place_for_models(unusable: Mount) -> None:
    usable = [mount("/"), mount("/mnt/big", "xfs"), mount("/run/media/me/stick", "exfat")]
    assert usable_mounts([*usable, unusable], ROOT) == usable


def test_a_device_that_is_mounted_twice_counts_once() -> None:
    mounts = [
        mount("/home", "btrfs", "/dev/sda2"),
        mount("/", "btrfs", "/dev/sda2"),
        mount("/var/data", "btrfs", "/dev/sda2"),
        mount("/pool/a", "zfs", "pool/a"),
        mount("/pool/b", "zfs", "pool/b"),
    ]
    assert [str(m.path) for m in usable_mounts(mounts, Path("/home"))] == ["/home", "/pool/a", "/pool/b"]
    assert [str(m.path) for m in usable_mounts(mounts, ROOT)] == ["/", "/pool/a", "/pool/b"]


def test_the_root_of_a_container_counts_and_network_disks_are_marked() -> None:
    container = mount("/", "overlay", "overlay")
    network = [mount("/mnt/nfs", "nfs4", "server:/x"), mount("/mnt/ssh", "fuse.sshfs", "me@host:")]
    assert usable_mounts([container, *network], ROOT) == [container, *network]
    assert [m.is_network for m in (container, *network)] == [False, True, True]


def test_a_home_on_an_unusual_file_system_is_offered_all_the_same() -> None:
    home = mount("/home", "ecryptfs", "/home/.private")
    assert home in usable_mounts([home, mount("/")], Path("/home"))


def test_the_largest_sensible_disk_is_preselected() -> None:
    home = disk("/", 60)
    assert preselected([home, disk("/mnt/big", 900), disk("/mnt/small", 20)]).mount == Path("/mnt/big")
    assert preselected([home, disk("/mnt/small", 20)]) == home
    assert preselected([home]) == home
    assert preselected([]) is None


@pytest.mark.parametrize(
    "changes", [{"is_network": True}, {"is_removable": True}, {"fs_type": "exfat"}, {"free_bytes": 5 * GB}]
)
def test_what_is_never_preselected(changes: dict[str, object]) -> None:
    home, other = disk("/", 60), disk("/mnt/other", 900, **changes)
    assert preselected([home, other]) == home
    assert not is_real_choice([home, other])
    assert is_real_choice([home, disk("/mnt/big", 900)])


def test_a_spinning_disk_is_preselected_only_where_others_are_full() -> None:
    spinning = disk("/mnt/spinning", 4000, is_rotational=True)
    assert preselected([disk("/", 200), spinning]).mount == ROOT
    assert preselected([disk("/", 60), spinning]) == spinning


def test_a_roomier_disk_is_recommended_only_to_who_needs_one() -> None:
    big = disk("/mnt/big", 900)
    assert roomier_disk([disk("/", 12), big], 12 * GB) == big
    assert roomier_disk([disk("/", 41), big], 41 * GB) is None
    assert roomier_disk([disk("/", 12)], 12 * GB) is None


def test_the_folder_on_a_disk_is_never_someone_elses(tmp_path: Path) -> None:
    assert folder_on(tmp_path, "me") == tmp_path / "quire"
    (tmp_path / "quire").mkdir()
    assert folder_on(tmp_path, "me") == tmp_path / "quire"
    (tmp_path / "quire" / "README.md").write_text("a checkout of that name")
    assert folder_on(tmp_path, "me") == tmp_path / "quire-data"
    DataRoot.open(tmp_path / "quire-data")
    assert folder_on(tmp_path, "me") == tmp_path / "quire-data"


def test_a_disk_where_only_the_users_directory_takes_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "me").mkdir()
    monkeypatch.setattr("store.disk.filesystems.os.access", lambda path, _mode: Path(path) == tmp_path / "me")
    assert folder_on(tmp_path, "me") == tmp_path / "me/quire"
    assert folder_on(tmp_path, "you") is None


def block(sys: Path, name: str, rotational: str | None, partition_of: str = "", parts: tuple[str, ...] = ()) -> Path:
    path = sys / "devices" / partition_of / name
    path.mkdir(parents=True)
    if partition_of:
        (path / "partition").write_text("1")
    if rotational is not None:
        (path / "queue").mkdir()
        (path / "queue/rotational").write_text(f"{rotational}\n")
    for part in parts:
        (path / "slaves").mkdir(exist_ok=True)
        (path / "slaves" / Path(part).name).symlink_to(sys / "devices" / part)
    (sys / "dev/block").mkdir(parents=True, exist_ok=True)
    link = sys / "dev/block" / name
    link.symlink_to(path)
    return link


def test_what_spins_is_found_through_partitions_and_mapped_devices(tmp_path: Path) -> None:
    assert is_rotational(block(tmp_path, "sda", "1")) is True
    assert is_rotational(block(tmp_path, "nvme0n1", "0")) is False
    assert is_rotational(block(tmp_path, "vda", "1")) is None
    assert is_rotational(block(tmp_path, "sda1", None, partition_of="sda")) is True
    assert is_rotational(block(tmp_path, "nvme0n1p2", None, partition_of="nvme0n1")) is False
    assert is_rotational(block(tmp_path, "dm-0", "0", parts=("sda/sda1",))) is True
    assert is_rotational(block(tmp_path, "dm-1", "1", parts=("nvme0n1/nvme0n1p2",))) is False
    assert is_rotational(block(tmp_path, "md0", "0", parts=("dm-1", "dm-0"))) is True
    assert is_rotational(tmp_path / "dev/block/absent") is None


def test_this_machine_has_a_home_disk() -> None:
    (home,) = [disk for disk in read_disks() if disk.is_home]
    assert home.folder == platform_data_root()
    assert home.mount == mount_of(platform_data_root())
    assert 0 <= home.free_bytes <= home.total_bytes

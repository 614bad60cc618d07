"""Which disks of this machine could hold the data root, and which of them is the sensible one.

`usable_mounts`, `preselected` and `roomier_disk` are functions over plain values; `read_disks` alone asks
the system.  Knows nothing of what a data root contains.  Called by `quire disk` and the first run.
"""

from __future__ import annotations

import getpass
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from store.background import in_background
from store.known_roots import MARKER_NAME, mount_of
from store.paths import platform_data_root

LOW_SPACE_BYTES = 40 * 10**9
"""Less than this beside the models is worth a warning: one larger model takes it."""

_SENSIBLE_FREE_BYTES = 10 * 10**9
_ENOUGH_SOLID_BYTES = 100 * 10**9
_NETWORK_TIMEOUT_S = 1.0

_PLAIN_TYPES = frozenset({"ntfs", "ntfs3", "fuseblk", "exfat", "vfat", "msdos"})
"""Without the links and permissions that the cache's layout relies on, or without large files."""
_LINUX_TYPES = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs"})
_LOCAL_TYPES = _LINUX_TYPES | _PLAIN_TYPES | {"apfs", "hfs"}
_SERVER_TYPES = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p", "virtiofs"})
_CLUSTER_TYPES = frozenset({"ceph", "lustre", "gpfs", "beegfs", "ocfs2", "gfs2", "orangefs", "glusterfs"})
_NETWORK_PREFIX = "fuse."
_KERNEL_PLACES = ("/proc", "/sys", "/dev", "/run", "/boot", "/efi", "/etc", "/usr", "/System", "/private/var/vm")
_PACKAGE_PLACES = ("/snap", "/var/snap", "/var/lib/snapd", "/var/lib/docker", "/var/lib/containers", "/var/lib/kubelet")
_REMOVABLE_PLACES = ("/media", "/run/media", "/Volumes")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system as the kernel lists it."""

    path: Path
    device: str
    fs_type: str
    is_read_only: bool = False

    @property
    def is_network(self) -> bool:
        return self.fs_type in _SERVER_TYPES | _CLUSTER_TYPES or self.fs_type.startswith(_NETWORK_PREFIX)


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system that takes a write; `folder` is the data root that Quire would use there.

    `is_rotational` is None where the system does not say, as for virtual disks.
    """

    mount: Path
    fs_type: str
    free_bytes: int
    total_bytes: int
    folder: Path
    is_home: bool = False
    is_rotational: bool | None = None
    is_network: bool = False
    is_removable: bool = False

    @property
    def is_sensible(self) -> bool:
        """Whether models belong there: local, built in, with room, and with links between files."""
        return (
            not (self.is_network or self.is_removable or self.fs_type in _PLAIN_TYPES)
            and self.free_bytes >= _SENSIBLE_FREE_BYTES
        )

    @property
    def kind(self) -> str:
        """SSD, HDD, network, removable, or "disk" where the system does not say."""
        if self.is_network:
            return "network"
        if self.is_removable:
            return "removable"
        return {True: "HDD", False: "SSD", None: "disk"}[self.is_rotational]


def usable_mounts(mounts: Sequence[Mount], home: Path) -> list[Mount]:
    """Mounts that may hold large files, each device once; `home` is the mount of the home directory.

    Of several mounts of one device (bind mounts, subvolumes) the home's is kept, else the shortest path.
    """
    kept: dict[str, Mount] = {}
    for mount in sorted(mounts, key=lambda mount: (mount.path != home, len(str(mount.path)))):
        is_local = mount.fs_type in _LOCAL_TYPES or (mount.fs_type == "overlay" and mount.path == Path("/"))
        if mount.path != home and (_is_system_place(mount.path) or not (is_local or mount.is_network)):
            continue
        # The datasets of one pool and the exports of one server are file systems of their own.
        key = mount.device if mount.device.startswith("/dev/") else str(mount.path)
        if not mount.is_read_only:
            kept.setdefault(key, mount)
    return sorted(kept.values(), key=lambda mount: str(mount.path))


def preselected(disks: Sequence[Disk]) -> Disk | None:
    """The sensible disk with the most room; one that rotates only if no other has plenty."""
    sensible = [disk for disk in disks if disk.is_sensible]
    solid = [disk for disk in sensible if disk.is_rotational is not True]
    if any(disk.free_bytes >= _ENOUGH_SOLID_BYTES for disk in solid):
        sensible = solid
    best = max(sensible, key=lambda disk: (disk.free_bytes, disk.is_home), default=None)
    return best or next((disk for disk in disks if disk.is_home), None)


def is_real_choice(disks: Sequence[Disk]) -> bool:
    """Whether there is another sensible disk than the home's."""
    return any(disk.is_sensible and not disk.is_home for disk in disks)


def roomier_disk(disks: Sequence[Disk], free_bytes: int) -> Disk | None:
    """A disk to recommend to someone whose data root's disk has `free_bytes`; None where it has enough."""
    best = preselected(disks)
    if free_bytes >= LOW_SPACE_BYTES or best is None or best.is_home or best.free_bytes <= free_bytes:
        return None
    return best


def folder_on(mount: Path, user: str) -> Path | None:
    """Where on a mount a data root could be made: `quire` on it or in a directory of the user's; None for nowhere."""
    for place in (mount, mount / user):
        for folder in (place / "quire", place / "quire-data"):
            if _is_data_root(folder) or (_is_empty(folder) and os.access(folder, os.W_OK)):
                return folder
            if not folder.exists() and os.access(place, os.W_OK | os.X_OK):
                return folder
    return None


def user_folder_on(mount: Path) -> Path | None:
    """`folder_on` for the user of this process."""
    return folder_on(mount, _user())


def is_rotational(block: Path) -> bool | None:
    """Whether a block device of /sys, such as /sys/dev/block/8:1, is a spinning disk; None if nobody knows.

    A partition is answered for by its disk; mapped devices and arrays by what they are made of.
    """
    block = block.resolve()
    if (block / "partition").exists():
        block = block.parent
    parts = [is_rotational(part) for part in _entries(block / "slaves")]
    if parts:
        return True if True in parts else None if None in parts else False
    # A virtual disk's flag says nothing of the disk behind it.
    if block.name.startswith(("vd", "xvd")):
        return None
    return {"0": False, "1": True}.get(_read(block / "queue/rotational"))


def read_disks() -> list[Disk]:
    """The disks of this machine that this user can write to, by mount point."""
    import psutil

    home = mount_of(platform_data_root())
    mounts = [
        Mount(Path(part.mountpoint), part.device, part.fstype, "ro" in part.opts.split(","))
        for part in psutil.disk_partitions(all=True)
    ]
    if all(mount.path != home for mount in mounts):
        # Some sandboxes hide what is mounted.
        mounts.append(Mount(home, "", "unknown"))
    disks = [_read_disk_in_time(mount, home) for mount in usable_mounts(mounts, home)]
    return [disk for disk in disks if disk is not None]


def free_bytes_at(path: Path) -> int:
    """Free bytes of the file system that holds `path`, or would hold it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def _read_disk_in_time(mount: Mount, home: Path) -> Disk | None:
    if not mount.is_network:
        return _read_disk(mount, home)
    try:
        # A server that is gone would block the question for ever.
        return in_background(partial(_read_disk, mount, home)).result(_NETWORK_TIMEOUT_S)
    except TimeoutError:
        return None


def _read_disk(mount: Mount, home: Path) -> Disk | None:
    is_home = mount.path == home
    try:
        folder = platform_data_root() if is_home else user_folder_on(mount.path)
        if folder is None or not mount.path.is_dir():
            return None
        usage = shutil.disk_usage(mount.path)
        block = _block_device(mount)
    except OSError:
        return None
    return Disk(
        mount=mount.path,
        fs_type=mount.fs_type,
        free_bytes=usage.free,
        total_bytes=usage.total,
        folder=folder,
        is_home=is_home,
        is_rotational=None if mount.is_network else is_rotational(block),
        is_network=mount.is_network,
        is_removable=_is_below(mount.path, _REMOVABLE_PLACES) or _read(block / "removable") == "1",
    )


def _block_device(mount: Mount) -> Path:
    """Its directory in /sys, which may not exist."""
    number = mount.path.stat().st_dev
    try:
        facts = Path(mount.device).stat()
        # Of btrfs the mount shows a number that no device has.
        number = facts.st_rdev if stat.S_ISBLK(facts.st_mode) else number
    except (OSError, ValueError):
        pass
    return Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")


def _is_system_place(path: Path) -> bool:
    return _is_below(path, _KERNEL_PLACES + _PACKAGE_PLACES) and not _is_below(path, _REMOVABLE_PLACES)


def _is_below(path: Path, places: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(place) for place in places)


def _is_data_root(folder: Path) -> bool:
    return (folder / MARKER_NAME).is_file() and os.access(folder, os.W_OK)


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not _entries(folder)


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "nobody"

"""What the machine says about its memory: the kernel's estimate, and cgroup limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvloom.errors import ConfigError


def read_available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes this process can still allocate: the kernel's estimate, or less if a cgroup says so.

    Raises:
        ConfigError: the system does not tell (no /proc/meminfo).
    """
    try:
        available = _read_fields(root / "proc/meminfo")["MemAvailable:"] * 1024
    except (OSError, KeyError):
        raise ConfigError(
            "this system does not tell its available memory (/proc/meminfo); set kv_cache_bytes"
        ) from None
    return max(min([available, *_cgroup_rooms(root)]), 0)


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    """Where a cgroup version keeps a group's limit, its usage, and the cache it could drop."""

    mount: str
    limit: str
    usage: str
    droppable: str


_CGROUP_V2 = _CgroupFiles("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = _CgroupFiles(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Room under the limit of each cgroup above this process, in either cgroup version."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, name = entry.split(":", 2)
        if not controllers:
            files = _CGROUP_V2
        elif "memory" in controllers.split(","):
            files = _CGROUP_V1
        else:
            continue
        path = PurePosixPath(name.lstrip("/"))
        # Inside a container the named group may not be mounted; its mount point then is the group.
        for group in (path, *path.parents):
            yield from _cgroup_room(root / files.mount / group, files)


def _cgroup_room(group: Path, files: _CgroupFiles) -> Iterator[int]:
    try:
        limit = (group / files.limit).read_text().strip()
        if limit == "max":
            return
        used = int((group / files.usage).read_text())
        droppable = _read_fields(group / "memory.stat").get(files.droppable, 0)
    except OSError:
        return
    yield int(limit) - used + droppable


def _read_fields(path: Path) -> dict[str, int]:
    """The `name number` lines of a kernel file."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}

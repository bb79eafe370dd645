"""Memory of the process and of the host it runs on, by what the kernel says.

The limit that matters is the smallest of the machine's memory and the limits of the control groups
the process is in: a container is killed at the latter.
"""

import os
from pathlib import Path

from meshscope.store.schema import MISSING

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_STATM = "/proc/self/statm"
_MAX_STATM_BYTES = 256
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes a number near 2^63 where there is no limit."""


def resident_bytes() -> int:
    """Resident set size of this process; -1 where the system does not tell."""
    try:
        file = os.open(_STATM, os.O_RDONLY)  # half the time of a Python file
        try:
            return int(os.read(file, _MAX_STATM_BYTES).split()[1]) * _PAGE_BYTES
        finally:
            os.close(file)
    except (OSError, ValueError, IndexError):
        return MISSING


def read_host_memory() -> dict[str, int]:
    """`total_bytes` of the machine and `limit_bytes` of the control groups, as far as known."""
    found = {"total_bytes": read_total_bytes(), "limit_bytes": read_limit_bytes()}
    return {name: value for name, value in found.items() if value > 0}


def read_total_bytes(meminfo: Path = _MEMINFO) -> int:
    """Memory of the machine; -1 where the system does not tell."""
    try:
        for line in meminfo.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # not Linux, or a strange one
    return MISSING


def read_limit_bytes(cgroup: Path = _CGROUP, root: Path = _CGROUP_ROOT) -> int:
    """The smallest limit of the process's control groups, both versions; -1 without one."""
    limits = []
    for line in _read_lines(cgroup):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            folder, name = root / path.strip("/"), "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = root / "memory" / path.strip("/"), "memory.limit_in_bytes"
        else:
            continue
        # A container sees its own group at the root, not at the path.
        for parent in {folder, *folder.parents, root / "memory" if controllers else root}:
            if parent == root or root in parent.parents:
                limits += [int(text) for text in _read_lines(parent / name) if text.isdecimal()]
    return min((limit for limit in limits if 0 < limit < _NO_LIMIT_BYTES), default=MISSING)


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []

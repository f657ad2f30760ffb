"""How much main memory a new allocation may count on."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMITS = (  # (limit, used): version 2, then version 1
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def available_memory() -> int:
    """Bytes free for this process: of the machine, or of its control group where that has less.

    Where the system does not tell (macOS), half of the machine's memory.
    """
    amounts = [_machine_memory()]
    for limit, used in _CGROUP_LIMITS:
        try:
            amounts.append(int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
    return max(0, min(amounts))


def _machine_memory() -> int:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

"""How much main memory a new allocation may count on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Where the kernel tells about a control group."""

    limit: Path
    used: Path  # the page cache included
    statistics: Path
    reclaimable: str  # of the statistics: cached pages that the kernel takes back before it refuses an allocation

    def free(self) -> int | None:
        """Bytes left below the limit; None where there is no such group, or no limit.

        Reading a checkpoint fills the page cache, up to the limit: what of it is inactive counts as free.
        """
        try:
            return int(self.limit.read_text()) - int(self.used.read_text()) + self._cached()
        except (OSError, ValueError):  # ValueError: "max", no limit
            return None

    def _cached(self) -> int:
        try:
            for line in self.statistics.read_text().splitlines():
                name, _, amount = line.partition(" ")
                if name == self.reclaimable:
                    return int(amount)
        except (OSError, ValueError):
            pass
        return 0


_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
_CONTROL_GROUPS = (
    ControlGroup(_V2 / "memory.max", _V2 / "memory.current", _V2 / "memory.stat", "inactive_file"),
    ControlGroup(
        _V1 / "memory.limit_in_bytes", _V1 / "memory.usage_in_bytes", _V1 / "memory.stat", "total_inactive_file"
    ),
)


def available_memory() -> int:
    """Bytes free for this process: of the machine, or of its control group where that has less.

    Where the system does not tell (macOS), half of the machine's memory.
    """
    amounts = [_machine_memory()]
    amounts += [free for group in _CONTROL_GROUPS if (free := group.free()) is not None]
    return max(0, min(amounts))


def _machine_memory() -> int:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

"""What of the machine's processors is for this process: cores, by its affinity and its control group, and a GPU.

Knows no options. Called by the worker, for its threads and for what it says of the machine, and by `busy_poll`.
"""

import contextlib
import glob
import os
from pathlib import Path, PurePosixPath


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU, as far as that can be said without loading torch."""
    return bool(glob.glob("nvidia[0-9]*", root_dir="/dev")) or Path("/dev/dxg").exists()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def granted_cores(cgroup: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """As many of them as its control group's share of their time amounts to, or that of a group around it.

    Args:
        cgroup: where the groups are mounted.
        membership: the file that names this process's groups, a line `number:controllers:path` each.
    """
    names = {"/"}  # in a container the mounted folder is its own group
    with contextlib.suppress(OSError, ValueError):
        for line in membership.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                names |= {name, *map(str, PurePosixPath(name).parents)}
    return min(_share(cgroup, name.lstrip("/")) for name in names)


def granted_threads() -> int:
    """How many threads can compute at once: with more than it is granted, a process is stopped again and again."""
    return max(1, int(granted_cores()))


def _share(cgroup: Path, name: str) -> float:
    """The cores that one group may use."""
    count = usable_cores()
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no limit has "max" for a number
        quota_us, period_us = (cgroup / name / "cpu.max").read_text().split()
        return min(count, int(quota_us) / int(period_us))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # version 1, where no limit is -1
        quota = int((cgroup / "cpu" / name / "cpu.cfs_quota_us").read_text())
        period = int((cgroup / "cpu" / name / "cpu.cfs_period_us").read_text())
        return min(count, quota / period) if quota > 0 else count
    return count

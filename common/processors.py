"""How many of the machine's processors are for this process: by its affinity, and by its control group.

Knows no options. Called by the worker, for its threads and for what it says of the machine, and by `busy_poll`.
"""

import contextlib
import os
from pathlib import Path


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def granted_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """As many of them as its control group's share of their time amounts to."""
    count = usable_cores()
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no limit has "max" for a number
        quota_us, period_us = (cgroup / "cpu.max").read_text().split()
        return min(count, int(quota_us) / int(period_us))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # version 1, where no limit is -1
        quota = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        return min(count, quota / int((cgroup / "cpu/cpu.cfs_period_us").read_text())) if quota > 0 else count
    return count

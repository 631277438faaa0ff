"""The resources of a running engine's processes: memory, file descriptors, threads, CPU. From /proc; Linux only.

Called by benchmarks/soak.py and benchmarks/idle.py. Processes are named by their titles: `supervisor`, `frontend`,
`scheduler`, `worker-0`.
"""

import contextlib
import itertools
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TITLE = "trireme-"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Holding:
    """One process at one time.

    Attributes:
        rss_mb: resident memory that is its own (not of files that are mapped), in MB.
        fds: open file descriptors by kind: `socket`, `pipe`, `anon_inode`, ...
    """

    rss_mb: float
    fds: Counter[str]
    threads: int


@dataclass(frozen=True)
class Activity:
    """What one process has used so far: CPU seconds, and how often its threads have waited for something and woken."""

    cpu_s: float
    wakes: int


def engine_processes(supervisor_pid: int) -> dict[str, int]:
    """Process ids of an engine by name, the supervisor's with them, and those that its processes have started."""
    return {"supervisor": supervisor_pid} | _children(supervisor_pid)


def _children(parent: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for task in Path(f"/proc/{parent}/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            title = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
            if title.startswith(TITLE):
                found[title.removeprefix(TITLE)] = pid
            found |= _children(pid)
    return found


def holding(pid: int) -> Holding:
    """What a process holds now; raises OSError if it is gone."""
    process = Path(f"/proc/{pid}")
    resident, shared = map(int, (process / "statm").read_text().split()[1:3])
    threads = len(os.listdir(process / "task"))
    return Holding((resident - shared) * _PAGE_BYTES / 1e6, Counter(_fd_kinds(process / "fd")), threads)


def activity(pid: int) -> Activity:
    """What a process has used, with the threads it has; raises OSError if it is gone."""
    process = Path(f"/proc/{pid}")
    ticks = map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:13])
    wakes = 0
    for task in (process / "task").iterdir():
        text = (task / "status").read_text()
        wakes += int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return Activity(sum(ticks) / os.sysconf("SC_CLK_TCK"), wakes)


def _fd_kinds(folder: Path) -> Iterator[str]:
    for link in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that this is read through, or one just closed
            target = os.readlink(link)
            yield target.partition(":")[0] if ":" in target else "file"


def memory_growth_mb(samples: Sequence[Holding]) -> float:
    """How much more memory a process holds in the last third of its time than in the middle third (medians)."""
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[-third:]
    if not third:
        return 0.0
    return statistics.median(s.rss_mb for s in last) - statistics.median(s.rss_mb for s in middle)


def course(samples: Sequence[Holding], points: int = 15) -> list[float]:
    """A process's memory over its time, in MB: the medians of so many parts of it."""
    ends = [len(samples) * index // points for index in range(points + 1)]
    parts = [samples[begin:end] for begin, end in itertools.pairwise(ends) if end > begin]
    return [round(statistics.median(s.rss_mb for s in part), 1) for part in parts]

"""Busy polling: after a message a loop asks for the next one again and again, for a few milliseconds, before it sleeps.

A message between two processes wakes three threads one after another: ZeroMQ's I/O thread here, the one there, and the
loop that reads. On a host whose processors sleep while they have nothing to do, each of these takes tens of
microseconds, and a request's way has six messages. A loop that asks does not have to be woken. The I/O threads do not
either if they run on its processor, which is awake (`IoThreads`): a turn of the loop in vain gives it to them.

The price is a processor for each loop of an engine that is at work, so it is on by default only where there are many
(`limit_s_for`). Used by all processes and by the client SDK; knows no messages.
"""

import contextlib
import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import zmq

from common.sockets import io_thread_name

AUTOMATIC = -1.0
"""The option's value that leaves it to the machine."""
AUTOMATIC_MS = 5.0
LEAST_CPUS = 8
"""From here on there is one for each loop of an engine, and as many for what else they do."""
LOOKS_LIMIT = 20
"""How often to look for I/O threads that cannot be found: they get their names a moment after they were started."""
STREAK_LIMIT = 64
"""Messages without a turn in vain between them: a loop so busy needs its processor for itself."""

_is_linux = sys.platform == "linux"


def limit_s_for(option_ms: float, device: str = "auto") -> float:
    """How long after a message to ask for the next one, in seconds; 0 for not at all.

    Args:
        option_ms: `--busy-poll-ms`. If that is AUTOMATIC: AUTOMATIC_MS with a GPU and at least LEAST_CPUS processors,
            otherwise 0. (A worker on the CPU needs every processor for itself, and its steps take longer.)
        device: `--device`.
    """
    if option_ms >= 0:
        return option_ms / 1000
    is_worth_it = device != "cpu" and _has_gpu() and usable_cpus() >= LEAST_CPUS
    return AUTOMATIC_MS / 1000 if is_worth_it else 0.0


def usable_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """How many processors this process may use, by its affinity and by its control group's share of their time."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no limit has "max" for a number
        quota_us, period_us = (cgroup / "cpu.max").read_text().split()
        return min(count, int(quota_us) / int(period_us))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # version 1, where no limit is -1
        quota = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        return min(count, quota / int((cgroup / "cpu/cpu.cfs_period_us").read_text())) if quota > 0 else count
    return count


def _has_gpu() -> bool:
    """Whether there is an NVIDIA GPU, as far as that can be said without loading torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


class IoThreads:
    """The I/O threads of ZeroMQ contexts. Does nothing where a thread cannot be told its processor.

    Args:
        contexts: whose.
    """

    def __init__(self, *contexts: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._names = {io_thread_name(context) for context in contexts}
        self._looks_left = LOOKS_LIMIT if _is_linux else 0
        self._allowed: dict[int, set[int]] = {}
        self._cpu = -1
        self._current_cpu: Callable[[], int] = ctypes.CDLL(None).sched_getcpu if _is_linux else lambda: -1

    def follow(self) -> None:
        """Have them run on the calling thread's processor from now on."""
        cpu = self._current_cpu()
        if cpu == self._cpu or not (self._allowed or self._find()):
            return
        self._cpu = cpu
        self._each(lambda thread_id, allowed: os.sched_setaffinity(thread_id, {cpu} if cpu in allowed else allowed))

    def release(self) -> None:
        """Let them run anywhere again."""
        if self._cpu >= 0:
            self._cpu = -1
            self._each(os.sched_setaffinity)

    def _find(self) -> bool:
        if self._names and self._looks_left:
            self._looks_left -= 1
            found = {thread_id: os.sched_getaffinity(thread_id) for thread_id in _threads_named(self._names)}
            if len(found) == len(self._names):
                self._allowed, self._looks_left = found, 0
        return bool(self._allowed)

    def _each(self, act: Callable[[int, set[int]], object]) -> None:
        try:
            for thread_id, allowed in self._allowed.items():
                act(thread_id, allowed)
        except OSError:  # not permitted, or the thread has ended
            self._allowed = {}


def _threads_named(names: set[str]) -> Iterable[int]:
    """This process's threads with these names."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().strip() in names:
                yield int(task.name)


class BusyPoll:
    """When a loop asks again, and when it sleeps.

    A loop that waits in ZeroMQ's poll calls `poll`; another one calls `turn` whenever it has asked in vain. Both say
    `note` for a message that is part of a request.

    Args:
        limit_s: how long to ask after a message; 0 for not at all.
        threads: the I/O threads of the sockets that are asked.
        alone: held while asking, by one loop of a process at a time; the others sleep.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        limit_s: float,
        threads: IoThreads | None = None,
        *,
        alone: "threading.Lock | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_s = limit_s
        self.threads = threads or IoThreads()
        self._alone = alone
        self._clock = clock
        self._until_s = -math.inf
        self._streak = 0

    def note(self) -> None:
        """A message has come or gone; the next one may follow soon."""
        if not self.limit_s:
            return
        self._until_s = self._clock() + self.limit_s
        self._streak += 1
        if self._streak == STREAK_LIMIT:
            self.threads.release()

    def turn(self) -> bool:
        """Nothing was there: whether to ask again at once. Gives way to other threads first."""
        if self._clock() >= self._until_s:
            if self.limit_s:
                self.threads.release()
            return False
        self._streak = 0
        self.threads.follow()
        os.sched_yield()
        return True

    def give_way(self) -> None:
        """Let the I/O threads send what was handed to them, if there is more to do before the next turn."""
        if self._clock() < self._until_s:
            os.sched_yield()

    def poll(self, poller: zmq.Poller, timeout_ms: float | None = None) -> "list[tuple[object, int]]":
        """What the poller finds, as its own `poll`; an empty list after the timeout. None waits for ever."""
        start_s = self._clock()
        if start_s >= self._until_s or not (self._alone is None or self._alone.acquire(blocking=False)):
            return poller.poll(None if timeout_ms is None else math.ceil(timeout_ms))
        end_s = math.inf if timeout_ms is None else start_s + timeout_ms / 1000
        try:
            found = poller.poll(0)
            while not found and self._clock() < end_s and self.turn():
                found = poller.poll(0)
        finally:
            if self._alone is not None:
                self._alone.release()
        left_s = end_s - self._clock()
        if found or left_s <= 0:
            return found
        return poller.poll(None if timeout_ms is None else math.ceil(left_s * 1000))

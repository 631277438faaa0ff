"""Locks on files and directories (`flock`), which end with the process that holds them.

`directory_lock` is for binding a Unix socket: look whether its address is free, and take it, in one go. A Unix socket's
file outlives its process, so whoever binds first removes a file that nobody serves. If two engines did so at the same
moment, both would find nobody, and the second would remove the first one's file. Used by `sockets` and `http_socket`.

`is_locked` tells a directory in use from one that a killed process left behind; `try_lock` takes a lock if it is free.
Used by `run_dir` and `scratch`.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from common.errors import StartupError

TIMEOUT_S = 5.0
"""Engines hold the lock for less than a millisecond; this is for programs that mean something else by it."""
_POLL_S = 0.002


@contextlib.contextmanager
def directory_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a directory; without effect where there are no such locks, or we may not read it.

    Raises:
        StartupError: somebody else holds it all the time.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # what is to be bound there will say what is wrong
        yield
        return
    try:
        _lock(fd, path)
        yield
    finally:
        os.close(fd)


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock of a file or directory, or nobody can tell.

    Raises:
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # network file systems lock open-for-writing only
    try:
        return not try_lock(fd, without_locks=False)
    finally:
        os.close(fd)


def try_lock(fd: int, *, without_locks: bool) -> bool:
    """Whether the lock of an open file or directory is ours now, until it is closed.

    Args:
        fd: the open file.
        without_locks: the answer on a file system that has none.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return without_locks
    return True


def _lock(fd: int, path: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not try_lock(fd, without_locks=True):
        if time.monotonic() > deadline_s:
            raise StartupError(f"cannot bind in {path}: another program has had it locked for {TIMEOUT_S:g} s")
        time.sleep(_POLL_S)

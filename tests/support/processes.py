"""Processes by their ids, which a test may not be the parent of."""

import os
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether there is a process of this id; one that has ended and was not waited for counts."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def has_ended(pid: int) -> bool:
    """Whether a process has ended, waited for or not."""
    try:
        return not alive(pid) or b"zombie" in Path(f"/proc/{pid}/status").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it may have gone between the two looks
        return not alive(pid)

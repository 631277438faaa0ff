"""Temporary folders for work in progress: what a killed process left behind is removed by the next one.

Used where models are fetched and converted. They are beside the folder that is being made, since a rename must not
cross file systems.
"""

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common.file_locks import is_locked

LEAST_AGE_S = 60
"""A younger folder is left alone: its maker may not have locked it yet."""


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent`, locked while it is used and then removed, unless it was renamed.

    Folders of the same prefix that nobody holds are removed first.
    """
    for path in parent.glob(glob.escape(prefix) + "*"):
        with contextlib.suppress(FileNotFoundError):  # its owner may remove it meanwhile
            if time.time() - path.stat().st_mtime > LEAST_AGE_S and not _held(path):
                shutil.rmtree(path, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    fd = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: then nobody gets one to remove it either
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def _held(path: Path) -> bool:
    """Whether a process holds the folder's lock, or nobody can tell."""
    try:
        return is_locked(path)
    except OSError:
        return True

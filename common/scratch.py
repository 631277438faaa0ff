"""Temporary folders for work in progress: what a killed process left behind is removed by the next one.

Used where models are fetched and converted, beside the folder that is being made, since a rename must not cross file
systems; and by the verb `check`. Both also ask `unwritable` before they begin.
"""

import contextlib
import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.file_locks import try_lock


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent`, locked while it is used and then removed, unless it was renamed.

    Folders of the same prefix that nobody holds are removed first, however young: a process that has been interrupted
    is often started again at once, and after that one perhaps never.
    """
    for path in parent.glob(glob.escape(prefix) + "*"):
        _remove_unless_held(path)
    folder, fd = _make(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def unwritable(folder: Path) -> str:
    """Why nothing can be made in a folder, which need not exist yet; empty if it can."""
    for path in (folder, *folder.parents):
        if path.exists():
            nearest = path
            break
        if path.is_symlink():
            return f"{path} is a link to what is not there"
    if not nearest.is_dir():
        return os.strerror(errno.ENOTDIR)
    return "" if os.access(nearest, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)


def _make(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock; another try if it was taken for a left one before that."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            fd = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if try_lock(fd, without_locks=True) and folder.exists():
            return folder, fd
        os.close(fd)


def _remove_unless_held(path: Path) -> None:
    """Remove a folder while holding its lock, so that its maker, if it is new, sees that it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # its owner has removed it meanwhile, or it is not ours
        return
    try:
        if try_lock(fd, without_locks=False):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)

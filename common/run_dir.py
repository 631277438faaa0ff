"""An engine's run directory: created, found again by other commands, and removed.

A directory of mode 0700 that only one engine uses. It holds the internal sockets, `config.json` and, once the engine
serves, `ready.json`. The supervisor holds a lock on its `lock` file for as long as it lives, so that the next start can
tell a directory in use from one that a killed supervisor left behind. Used by `launch.py`.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import SOCKET_PATH_LIMIT
from common.errors import StartupError
from common.file_locks import is_locked

PREFIX = "trireme-"
_MADE = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")
"""The names of run directories, which are drawn by lot."""
_LONGEST_NAME = len("/trireme-12345678/requests.99999.sock")


@dataclass(frozen=True)
class Instance:
    """A running engine.

    Attributes:
        path: its run directory.
        pid: its supervisor.
        ready: what the supervisor wrote when the engine was ready; {} before.
    """

    path: Path
    pid: int
    ready: dict[str, Any]


class RunDir:
    """The directory of this process's instance; use as a context manager that removes it.

    Args:
        base: where to make it; None chooses XDG_RUNTIME_DIR or the temporary directory.

    Raises:
        StartupError: no directory could be made whose socket paths are short enough.
    """

    def __init__(self, base: Path | None = None) -> None:
        base = base or base_dir()
        try:
            remove_stale(base)
            self.path, self._lock_fd = _make(base)
        except OSError as error:
            raise StartupError(f"cannot make a run directory in {base}: {error.strerror}") from None

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def write(self, name: str, text: str) -> Path:
        """Write a file of mode 0600 in one piece: readers see all of it or none.

        Raises:
            StartupError: there is no room, or no directory any more.
        """
        path = self.path / name
        try:
            write_atomically(path, text)
        except OSError as error:
            raise StartupError(f"cannot write {path}: {error.strerror}") from None
        return path

    def remove(self) -> None:
        """Remove the directory and everything in it; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def base_dir() -> Path:
    """The directory that holds run directories.

    Raises:
        StartupError: its path is too long for sockets.
    """
    candidates = _candidates()
    for path in candidates:
        if path.is_dir() and os.access(path, os.W_OK) and _short_enough(path):
            return path
    raise StartupError(
        f"no usable directory for sockets among {', '.join(map(str, candidates))}: wanted a writable one with a "
        f"path of at most {SOCKET_PATH_LIMIT - _LONGEST_NAME} characters; set TMPDIR or XDG_RUNTIME_DIR"
    )


def _candidates() -> list[Path]:
    """Where run directories are made, if one can be; the first that will do."""
    return [
        Path(name).absolute() for name in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp") if name
    ]


def instances(base: Path | None = None) -> list[Instance]:
    """The engines of this user that run now."""
    found = []
    for path in _own_dirs(base or base_dir()):
        with contextlib.suppress(OSError, ValueError):  # it may end while we look
            if _in_use(path):
                ready = path / "ready.json"
                pid = int((path / "lock").read_text())
                found.append(Instance(path, pid, json.loads(ready.read_text()) if ready.exists() else {}))
    return found


def may_return(socket_path: Path) -> bool:
    """Whether somebody may still serve at a Unix socket: not in the run directory of an engine that has ended, which
    nobody takes over. Any other directory may be made again, as a service manager does for its services.
    """
    folder = socket_path.parent
    if not folder.name.startswith(PREFIX):
        return True
    try:
        return is_locked(folder / "lock")
    except FileNotFoundError:
        return folder.is_dir()  # not made by us, or just being removed
    except OSError:  # nobody can tell now
        return True


def is_left_behind(socket_path: Path) -> bool:
    """Whether a Unix socket would be in the run directory of an engine that has ended: that was killed, or has removed
    it. (Nobody knows such a name before the directory is made.) False where nobody can tell.
    """
    folder = socket_path.parent
    try:
        return folder.name.startswith(PREFIX) and not is_locked(folder / "lock")
    except FileNotFoundError:
        is_own = _MADE.fullmatch(folder.name) and folder.parent in _candidates()
        return bool(is_own) and not os.path.lexists(folder)
    except OSError:
        return False


def remove_stale(base: Path) -> None:
    """Remove the directories of instances that no longer run."""
    for path in _own_dirs(base):
        if (path / "lock").exists() and not _in_use(path):
            shutil.rmtree(path, ignore_errors=True)


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file beside its place and move it there; of a mode from which the process's umask takes its part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    temporary.replace(path)


def _short_enough(base: Path) -> bool:
    return len(os.fsencode(base.absolute())) + _LONGEST_NAME <= SOCKET_PATH_LIMIT


def _make(base: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # taken for stale, and held to remove it, by another start between these two calls
            os.close(lock_fd)
            continue
        except OSError:  # a file system without locks
            os.close(lock_fd)
            shutil.rmtree(path, ignore_errors=True)
            raise
        if (path / "lock").exists():  # it was not removed before we locked it
            os.write(lock_fd, str(os.getpid()).encode())
            return path, lock_fd
        os.close(lock_fd)


def _own_dirs(base: Path) -> list[Path]:
    paths = []
    for path in sorted(base.glob(PREFIX + "*")):
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid():
                paths.append(path)
    return paths


def _in_use(path: Path) -> bool:
    try:
        return is_locked(path / "lock")
    except OSError:
        return False

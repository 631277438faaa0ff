"""Python's bytecode where it is not beside torch's files: compiled side by side, and kept for later starts.

To import torch takes two seconds on a slow host, and five where its 700 files have to be compiled first: some
installers leave that to the first import, and a container may forbid it to keep the result (PYTHONDONTWRITEBYTECODE).
Then it is kept in the folder in which Triton keeps compiled kernels, and a process compiles on all cores what the
import is about to come to:

    python -E -B -m worker_proc.bytecode WIDTH OWN_FOLDER PACKAGE_FOLDER ...

Whoever can write there could have this process run anything. So the folder counts only if it is this user's or root's
and nobody else may write to it; and what a full disk has cut off is compiled anew.

That process ends with the worker. Called by the worker's start, before torch is imported.
"""

import importlib.util
import os
import py_compile
import shutil
import stat
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from kernels.compile_process import end_with
from kernels.import_torch import mend_bytecode

_ROOT = Path(__file__).resolve().parent.parent
FOLDER_NAME = "trireme-bytecode"
PACKAGES = ("triton", "torch", "numpy", "kernels", "worker_proc")
"""In the order in which the worker comes to them."""

NOT_IMPORTED = {"_dynamo", "_inductor", "onnx", "test", "testing", "tests"}
"""Parts of these that no engine needs, a third of all."""

_NICENESS = 10
_ROOM_BYTES = 256 << 20  # what all of it takes, and some more
_32_BITS = 0xFFFFFFFF


def keep_bytecode(folder: Path) -> None:
    """From here on, this process has its bytecode in FOLDER_NAME within `folder`, and so has the process that compiles
    kernels; not if torch's is beside its files or will be, or the user has chosen."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or sys.pycache_prefix is not None or _is_kept_beside(Path(spec.origin)):
        return
    own = Path(os.path.abspath(folder)) / FOLDER_NAME
    if not _is_safe(own):
        return
    sys.pycache_prefix = str(own)
    if not (_has_bytecode(Path(spec.origin)) or _has_room(own)):
        sys.pycache_prefix = None  # what lies beside other files is better than nothing
        return
    sys.dont_write_bytecode = False
    mend_bytecode()


def _is_safe(own: Path) -> bool:
    """Whether the folder is there, made if need be, and no other user can have written to it."""
    try:
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = own.lstat()
    except OSError:
        return False
    is_shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid in (os.geteuid(), 0) and not is_shared


def _has_room(own: Path) -> bool:
    return os.access(own, os.W_OK) and shutil.disk_usage(own).free >= _ROOM_BYTES


def compile_beside_import(width: int) -> None:
    """If torch's bytecode is nowhere and may be kept, have a process compile `width` files at a time, beside torch's
    import. Returns at once."""
    if sys.dont_write_bytecode:
        return
    found = {name: importlib.util.find_spec(name) for name in PACKAGES}
    sources = {name: Path(spec.origin) for name, spec in found.items() if spec is not None and spec.origin is not None}
    if "torch" not in sources or _has_bytecode(sources["torch"]):
        return
    if not (sys.pycache_prefix or os.access(sources["torch"].parent, os.W_OK)):
        return
    command = [sys.executable, "-E", "-B", "-m", "worker_proc.bytecode", str(width), sys.pycache_prefix or ""]
    command += [str(source.parent) for source in sources.values()]
    threading.Thread(target=_run, args=(command,), name="compile-bytecode", daemon=True).start()


def _run(command: list[str]) -> None:
    with suppress(OSError):
        subprocess.run(command, cwd=_ROOT, check=False)


def main() -> None:
    """Compile the files of some packages, by so many processes."""
    end_with(os.getppid())
    width, own, *packages = sys.argv[1:]
    sys.pycache_prefix = own or None
    files = [path for package in packages for path in _imported_files(Path(package))]
    os.nice(_NICENESS)
    forking, forked = os.getpid(), []
    for first in range(int(width)):
        forked.append(os.fork())
        if not forked[-1]:
            try:
                end_with(forking)
                for path in files[first :: int(width)]:
                    _compile(path)
            finally:
                os._exit(0)
    for process in forked:
        os.waitpid(process, 0)


def _imported_files(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*.py") if not NOT_IMPORTED & set(path.relative_to(package).parts))


def _compile(source: Path) -> None:
    with suppress(OSError):  # the import compiles it, or says what is wrong
        if not _has_bytecode(source):
            py_compile.compile(str(source), quiet=2)


def _is_kept_beside(source: Path) -> bool:
    return _has_bytecode(source) or (not sys.dont_write_bytecode and os.access(source.parent, os.W_OK))


def _has_bytecode(source: Path) -> bool:
    """Whether an import would find bytecode of this Python and of this state of the file."""
    try:
        kept, found = Path(importlib.util.cache_from_source(str(source))).read_bytes(), source.stat()
        flags, changed_at_s, size = struct.unpack("<III", kept[4:16])
    except (OSError, struct.error):
        return False
    is_current = flags != 0 or (changed_at_s, size) == (int(found.st_mtime) & _32_BITS, found.st_size & _32_BITS)
    return kept[:4] == importlib.util.MAGIC_NUMBER and is_current


if __name__ == "__main__":
    main()

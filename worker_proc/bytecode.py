"""Python's bytecode, kept for later starts where it is not beside torch's files.

To import torch takes one to two seconds on a slow host, and twice that where its 700 files have to be compiled first:
some installers leave that to the first import, and a container may forbid it to keep the result
(PYTHONDONTWRITEBYTECODE), or forget it. Then it is kept in the folder in which Triton keeps compiled kernels. Called by
the worker's start, before torch is imported.
"""

import importlib.util
import os
import sys
from pathlib import Path

FOLDER_NAME = "trireme-bytecode"


def keep_bytecode(folder: Path) -> None:
    """From here on, this process has its bytecode in a folder of its own within that one, and so have processes that
    it starts; not if torch's is beside its files or will be, or the user has chosen."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or sys.pycache_prefix is not None or _is_kept_beside(Path(spec.origin)):
        return
    own = folder / FOLDER_NAME
    try:
        own.mkdir(parents=True, exist_ok=True)
    except OSError:  # nothing could be kept; what lies beside other files is better than nothing
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(own), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(own)  # for the process that compiles kernels
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _is_kept_beside(source: Path) -> bool:
    if Path(importlib.util.cache_from_source(str(source))).exists():
        return True
    return not sys.dont_write_bytecode and os.access(source.parent, os.W_OK)

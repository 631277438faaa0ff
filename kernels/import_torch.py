"""Imports torch, and what else takes its time before a kernel can be compiled or launched, as fast as it goes.

Importing this module takes neither torch nor Triton. Called by the GPU worker and by `kernels.compile_process`.
"""

import gc
import importlib.util
import os
import threading
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

_SETTINGS = {
    "OPENBLAS_NUM_THREADS": "1",  # of numpy's library, which would start a thread for each core and wait for them
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # else every installed package is asked whether it brings a kind of device
}


def mend_bytecode() -> None:
    """From here on, an import compiles anew what bytecode has been cut off, and drops that.

    Python 3.11 keeps as much as a full disk had room for, and each later import of the file fails.
    """
    get_code = SourceFileLoader.get_code

    def mended(loader: SourceFileLoader, name: str) -> CodeType | None:
        try:
            return get_code(loader, name)
        except (EOFError, TypeError, ValueError):  # what reading it ends with
            path = loader.get_filename(name)
            with suppress(OSError):
                Path(importlib.util.cache_from_source(path)).unlink()
            code: CodeType = loader.source_to_code(loader.get_data(path), path)
            return code

    SourceFileLoader.get_code = mended  # type: ignore[method-assign]


def import_torch() -> None:
    """Import torch while the garbage collector rests, which would find nothing in it, then or later."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    collects = gc.isenabled()
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def hash_triton() -> threading.Thread | None:
    """Import Triton and have a thread find the hash of its files, which is a part of every kernel's name on disk and
    takes half a second, most of it without the interpreter. None where there is no such hash, or no Triton."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        return None
    thread = threading.Thread(target=triton_key, name="hash-triton", daemon=True)
    thread.start()
    return thread

"""Imports torch, and what else takes its time before a kernel can be compiled or launched, as fast as it goes.

Importing this module takes neither torch nor Triton. Called by the GPU worker and by `kernels.compile_process`.
"""

import gc
import os
import threading

_SETTINGS = {
    "OPENBLAS_NUM_THREADS": "1",  # of numpy's library, which would start a thread for each core and wait for them
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # else every installed package is asked whether it brings a kind of device
}


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

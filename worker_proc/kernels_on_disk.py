"""Whether a start will find its kernels on disk: a guess, made before torch is imported.

The process that compiles kernels takes as long to begin as the worker itself. So it is started first of all, unless an
earlier start with the same options, kernels and Triton has left a note in Triton's folder. No harm is done where the
guess is wrong: kernels that are on disk are not compiled again, and for those that are missing the process is started
later. Called by the worker's start.
"""

import contextlib
import hashlib
from pathlib import Path

from common.config import EngineConfig
from common.processors import granted_threads, has_gpu
from kernels.compile_process import CompileProcess

_ROOT = Path(__file__).resolve().parent.parent


def compile_process(config: EngineConfig) -> CompileProcess:
    """What compiles the kernels of a start with this configuration; started if that is likely to be needed."""
    compiler = CompileProcess(config.worker.cpu_threads or granted_threads())
    if config.model.device != "cpu" and has_gpu():
        with contextlib.suppress(ImportError, OSError):  # no Triton, as with a torch for CPUs; or no folder for it
            if not _note(config).exists():
                compiler.start()
    return compiler


def note_kernels(config: EngineConfig) -> None:
    """Leave the note: all kernels of a start with this configuration are on disk. Not where the folder is read-only."""
    with contextlib.suppress(OSError):
        _note(config).touch()


def _note(config: EngineConfig) -> Path:
    from triton import __version__, knobs  # imports no torch

    options = (config.model_dir, config.model, config.cache, config.scheduler, config.worker)
    digest = hashlib.sha256(repr((__version__, options)).encode())
    for folder in ("kernels", "worker_proc/cuda"):
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return Path(knobs.cache.dir) / f"trireme-{digest.hexdigest()[:32]}"

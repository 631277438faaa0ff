"""Whether a start will find its kernels on disk: a guess, made before torch and Triton are imported.

The process that compiles kernels takes as long to begin as the worker itself. So it is started first of all, unless an
earlier start with the same options, kernels and Triton has left a note in Triton's folder: that what a start waits for
is there, and what else has yet to be compiled. No harm is done where the guess is wrong: kernels that are on disk are
not compiled again, and for those that are missing the process is started later. Called by the worker's start.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from common.config import EngineConfig
from common.processors import granted_threads, has_gpu
from common.run_dir import write_atomically
from kernels.compile_process import CompileProcess, Job

_ROOT = Path(__file__).resolve().parent.parent
_NAMING_KERNELS = ("kernels/**/*.py", "kernels/tuning/*.json", "worker_proc/cuda/**/*.py")
"""What settles which kernels a start needs, beside its options."""
_FOR_ALL = 0o666
"""The note's mode: others may have this folder too, or may be given it in an image."""


def compile_process(config: EngineConfig) -> CompileProcess:
    """What compiles the kernels of a start with this configuration; started if that is likely to be needed."""
    compiler = CompileProcess(config.worker.cpu_threads or granted_threads())
    has_triton = importlib.util.find_spec("triton") is not None
    if config.model.device != "cpu" and has_gpu() and has_triton and kernels_left(config) is None:
        compiler.start()
    return compiler


def note_kernels(config: EngineConfig, left: Sequence[Job] = ()) -> None:
    """Leave the note: all that a start with this configuration waits for is on disk, and these are not, perhaps. Not
    where the folder is read-only."""
    with contextlib.suppress(OSError):
        write_atomically(_note(config), json.dumps([asdict(job) for job in left]), _FOR_ALL)


def kernels_left(config: EngineConfig) -> list[Job] | None:
    """What the note says has yet to be compiled; None if there is no note that can be read."""
    try:
        return [Job(**job) for job in json.loads(_note(config).read_text())]
    except (OSError, ValueError, TypeError):
        return None


def triton_folder() -> Path:
    """Where Triton keeps what it has compiled, as it finds it itself: importing it takes a third of a second."""
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~/"))
    return Path(os.environ.get("TRITON_CACHE_DIR", os.path.join(home, ".triton", "cache")))


def _note(config: EngineConfig) -> Path:
    options = (config.model_dir, config.model, config.cache, config.scheduler, config.worker)
    digest = hashlib.sha256(repr(options).encode())
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        digest.update(Path(triton.origin).read_bytes())  # it says the version
    for files in _NAMING_KERNELS:
        for path in sorted(_ROOT.glob(files)):
            digest.update(path.read_bytes())
    return triton_folder() / f"trireme-{digest.hexdigest()[:32]}"

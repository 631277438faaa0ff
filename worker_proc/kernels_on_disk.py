"""Whether a start will find its kernels on disk: a guess, made before torch and Triton are imported.

The process that compiles kernels takes as long to begin as the worker itself. So it is started first of all, unless an
earlier start with the same options, kernels and Triton has left a note in Triton's folder: that what a start waits for
is there, and what else has yet to be compiled. Each kind of card has a note of its own, since its kernels are others;
but which card this is nobody knows before torch is there, so any card's note will do for the guess. No harm is done
where it is wrong: kernels that are on disk are not compiled again, and for those that are missing the process is
started later. Called by the worker's start.
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
_DIGITS = 32
"""Of each hash in a note's name."""
_FOR_ALL = 0o666
"""The note's mode: others may have this folder too, or may be given it in an image."""


def compile_process(config: EngineConfig) -> CompileProcess:
    """What compiles the kernels of a start with this configuration; started if that is likely to be needed."""
    compiler = CompileProcess(config.worker.cpu_threads or granted_threads())
    has_triton = importlib.util.find_spec("triton") is not None
    if config.model.device != "cpu" and has_gpu() and has_triton and not _is_noted(config):
        compiler.start()
    return compiler


def note_kernels(config: EngineConfig, card: str, left: Sequence[Job] = ()) -> None:
    """Leave the note: all that a start with this configuration on this card waits for is on disk, and these are not,
    perhaps. Not where the folder is read-only."""
    with contextlib.suppress(OSError):
        write_atomically(triton_folder() / _name(config, card), json.dumps([asdict(job) for job in left]), _FOR_ALL)


def kernels_left(config: EngineConfig, card: str) -> list[Job] | None:
    """What the note says has yet to be compiled; None if there is no note that can be read."""
    return _read(triton_folder() / _name(config, card))


def triton_folder() -> Path:
    """Where Triton keeps what it has compiled, as it finds it itself: importing it takes a third of a second."""
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~/"))
    return Path(os.environ.get("TRITON_CACHE_DIR", os.path.join(home, ".triton", "cache")))


def _is_noted(config: EngineConfig) -> bool:
    notes = triton_folder().glob(_name(config, None))
    return any(_read(note) is not None for note in notes)


def _read(note: Path) -> list[Job] | None:
    try:
        return [Job(**job) for job in json.loads(note.read_text())]
    except (OSError, ValueError, TypeError):
        return None


def _name(config: EngineConfig, card: str | None) -> str:
    """Of the note for a card; of those for all cards, as a pattern."""
    options = (config.model_dir, config.model, config.cache, config.scheduler, config.worker)
    digest = hashlib.sha256(repr(options).encode())
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        digest.update(Path(triton.origin).read_bytes())  # it says the version
    for files in _NAMING_KERNELS:
        for path in sorted(_ROOT.glob(files)):
            digest.update(path.read_bytes())
    of_card = "*" if card is None else hashlib.sha256(card.encode()).hexdigest()[:_DIGITS]
    return f"trireme-{digest.hexdigest()[:_DIGITS]}-{of_card}"

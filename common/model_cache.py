"""Where converted models are kept on disk, and whether the wanted one is there already.

Needs no torch and is quick, so that the supervisor can ask before it starts anything; `worker_proc.fetch_model` fills
the folders. A folder gets its final name only when it is complete (it is written elsewhere and renamed), so its
existence is all there is to check.
"""

import hashlib
import os
from pathlib import Path

from common.config import DEFAULT_MODEL
from common.errors import ConfigError

CACHE_VARIABLE = "TRIREME_CACHE"
DEFAULT_MODEL_DIR_NAME = "smollm2-135m-instruct-v2"
"""The number goes up whenever the conversion writes something else."""


def cache_root() -> Path:
    """`$TRIREME_CACHE`, else `$XDG_CACHE_HOME/trireme`, else `~/.cache/trireme`."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trireme"


def default_model_dir() -> Path:
    """Where the embedded default model is, or will be, after conversion."""
    return cache_root() / "models" / DEFAULT_MODEL_DIR_NAME


def gguf_model_dir(gguf_path: Path) -> Path:
    """Where the folder made from a .gguf file is, or will be; another one if the file changes."""
    path = gguf_path.resolve()
    stat = path.stat()
    key = hashlib.sha256(f"{path}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    return cache_root() / "models" / f"gguf-{path.stem}-{key}"


def is_hub_id(model: str) -> bool:
    """Whether a `--model` value is neither the embedded model nor something that is here."""
    return model != DEFAULT_MODEL and not Path(model).expanduser().exists()


def ready_model_dir(model: str) -> Path | None:
    """The local folder of a `--model` value if it is there now; None if `worker_proc.fetch_model` must make it.

    A hub id is never ready: only the hub's client knows its cache.

    Raises:
        ConfigError: the folder holds something that nobody can read to its end, or cannot be looked into.
    """
    if model == DEFAULT_MODEL:
        folder = default_model_dir()
        return folder if folder.is_dir() else None
    path = Path(model).expanduser()
    if path.is_dir():
        _check_files(path)
        return path.resolve()
    if path.suffix == ".gguf" and path.is_file():
        folder = gguf_model_dir(path)
        return folder if folder.is_dir() else None
    return None


def _check_files(folder: Path) -> None:
    """Refuse a folder with a pipe or a device in it: whoever reads one instead of a file waits for ever."""
    try:
        endless = [path.name for path in folder.iterdir() if path.is_fifo() or path.is_char_device()]
    except OSError as error:
        raise ConfigError(f"cannot look into {folder}: {error.strerror}") from None
    if endless:
        raise ConfigError(f"{min(endless)} in {folder} is a pipe or a device; a model folder holds files")

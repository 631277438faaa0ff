"""Reads the small files of a model's folder: JSON files and chat templates. Whoever made the folder, we did not.

Every refusal has one form, "cannot read PATH: why". What is no file is not waited for, and one too large is not loaded.
Weights and tokenizer.json, which are large, have their libraries' readers. Used by the frontend and the worker.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from common.errors import ConfigError

LARGEST_BYTES = 32 << 20
"""Of each file. The largest are indices of weights: that of a checkpoint with 100,000 tensors has 9 MB."""


def read_text(path: Path, called: str = "") -> str:
    """The text of a file.

    Args:
        path: the file.
        called: what a refusal calls it instead of `path`.

    Raises:
        ConfigError: it is not there, no file (a pipe may have no end), too large, or no UTF-8.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            reason = f"wanted a file, got {'a directory' if stat.S_ISDIR(found.st_mode) else 'a pipe or a device'}"
        elif found.st_size > LARGEST_BYTES:
            reason = f"wanted at most {LARGEST_BYTES:,} bytes, got {found.st_size:,}"
        else:
            return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:  # no UTF-8, or a path that no file can have
        reason = str(error)
    raise ConfigError(f"cannot read {called or path}: {reason}")


def read_object(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The object that a JSON file holds; raises as `read_text`, and ConfigError for whatever else it holds.

    Args:
        path: the file.
        missing_ok: a file that is not there counts as an empty object.
    """
    if missing_ok and not os.path.lexists(path):
        return {}
    value = _read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"cannot read {path}: wanted a JSON object, got {type(value).__name__}")
    return value


def read_array(path: Path) -> list[Any]:
    """The array that a JSON file holds; raises as `read_object`."""
    value = _read_json(path)
    if not isinstance(value, list):
        raise ConfigError(f"cannot read {path}: wanted a JSON array, got {type(value).__name__}")
    return value


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: wanted JSON: {error}") from None

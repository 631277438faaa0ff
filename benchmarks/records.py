"""Measured figures as JSON lines that can be compared: benchmarks/results/<benchmark>.jsonl, newest last.

One object a line: benchmark, engine, workload, model, weights, device, options, metrics, limit, versions, commit,
command, date. Knows no benchmark and imports torch only to name the GPU.
"""

import datetime
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS_DIR = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "transformers", "vllm", "pyzmq", "msgpack")


def record(
    *,
    benchmark: str,
    workload: str,
    metrics: dict[str, Any],
    model: str = "",
    weights: str = "",
    engine: str = "trireme",
    device: str = "",
    options: dict[str, Any] | None = None,
    limit: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One result with everything that would be needed to repeat it."""
    return {
        "benchmark": benchmark,
        "engine": engine,
        "workload": workload,
        "model": model,
        "weights": weights,
        "device": device or device_name(),
        "options": options or {},
        "metrics": metrics,
        "limit": limit or {},
        "versions": versions(),
        "commit": commit(),
        "command": "python -m " + " ".join([_module(), *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def save(records: list[dict[str, Any]], path: str | Path) -> None:
    """Append results to a file, a line each."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in records)


def check_output(path: str | Path) -> None:
    """Find out whether results can be kept there before they take minutes to measure; raises SystemExit."""
    try:
        if path:
            save([], path)
    except OSError as error:
        raise SystemExit(f"--output: cannot write {path}: {error.strerror}") from None


def finish(entry: dict[str, Any], path: str | Path | None) -> None:
    """Show a benchmark's one result, as a line of JSON, and append it to a file if one is named."""
    if path:
        save([entry], path)
    print(json.dumps(entry))


def model_label(model: str) -> str:
    """A model's name in results: the embedded one's, or the last part of a folder or hub id."""
    return "smollm2-135m" if model == "default" else Path(model).name.lower()


def device_name() -> str:
    """The GPU's name, or the processor's with its core count."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return host_name()


def host_name() -> str:
    """The processor's name with its core count."""
    return f"{processor_name()}, {os.cpu_count()} cores"


def processor_name() -> str:
    """What the processor calls itself."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a figure."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def commit() -> str:
    """The commit that was measured, marked if the tree differs; TRIREME_COMMIT names it where there is no git.

    Found out once: a benchmark's first line makes the tree differ where it is kept in it.
    """
    if named := os.environ.get("TRIREME_COMMIT"):
        return named
    run = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def _module() -> str:
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem

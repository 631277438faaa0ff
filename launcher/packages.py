"""Python and the installed packages against what pyproject.toml asks for. Called by `check`; imports none of them."""

import platform
import tomllib
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from common.config import DEFAULT_MODEL, EngineConfig
from common.findings import Findings
from common.model_cache import ready_model_dir

PROJECT_FILE = Path(__file__).resolve().parents[1] / "pyproject.toml"
SHOWN = ("torch", "triton", "transformers", "pyzmq")
HTTP_PACKAGES = ("starlette", "uvicorn", "prometheus-client")


def look_at_packages(config: EngineConfig) -> Findings:
    """Versions, and what is missing for what was asked for."""
    found = Findings()
    python_range, requirements = declared()
    version = platform.python_version()
    text = f"{version}; the project is for {python_range}"
    report = found.ok if SpecifierSet(python_range).contains(version, prereleases=True) else found.warn
    report("Python", text)
    _compare(found, requirements, config)
    if config.profiling.folder and installed_version("viztracer") is None:
        found.warn("profiling", "viztracer is not installed: traces of scheduler and frontend cost ten times as much; "
                   "pip install viztracer")  # fmt: skip
    return found


def declared() -> tuple[str, list[Requirement]]:
    """The range of Python and the requirements that hold on this machine: of the checkout, or as installed."""
    project = tomllib.loads(PROJECT_FILE.read_text()).get("project", {}) if PROJECT_FILE.is_file() else {}
    if project.get("name") == "trireme":  # beside an installed package it may be that of another one
        python_range, lines = project["requires-python"], project["dependencies"]
    else:
        python_range = metadata.metadata("trireme")["Requires-Python"]
        lines = metadata.requires("trireme") or []
    requirements = [Requirement(line) for line in lines]
    return python_range, [item for item in requirements if not item.marker or item.marker.evaluate({"extra": ""})]


def installed_version(name: str) -> str | None:
    """Of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_needed(name: str, config: EngineConfig) -> bool:
    """Whether these options make use of a package: `serve` starts without one that they do not."""
    if name in HTTP_PACKAGES:
        return config.server.http
    if name == "gguf":
        model = config.model.model
        return model.endswith(".gguf") or (model == DEFAULT_MODEL and ready_model_dir(model) is None)
    if name == "triton":
        return config.model.device == "cuda"  # with `auto` and a GPU, the worker's part runs into it
    return name != "pyyaml"  # a configuration file has been read by now


def _compare(found: Findings, requirements: Sequence[Requirement], config: EngineConfig) -> None:
    versions = {item.name: installed_version(item.name) for item in requirements}
    missing = [item for item in requirements if versions[item.name] is None]
    outside = [
        item for item in requirements
        if (version := versions[item.name]) and not item.specifier.contains(version, prereleases=True)
    ]  # fmt: skip
    for item in missing:
        text = f"{item.name} is missing; pip install '{item.name}{_range(item)}'"
        if is_needed(item.name, config):
            found.problem("packages", text)
        else:
            found.warn("packages", f"{text} (these options do without)")
    for item in outside:
        found.warn("packages", f"{item.name} is {versions[item.name]}; the project is for {_range(item)}")
    if not missing and not outside:
        found.ok("packages", f"all {len(requirements)} in their ranges: {_shown(versions.items())}")


def _range(item: Requirement) -> str:
    """The specifier, its lower bound first."""
    return ",".join(sorted(map(str, item.specifier), reverse=True))


def _shown(versions: Iterable[tuple[str, str | None]]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions if name in SHOWN)

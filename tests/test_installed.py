"""An installed copy, in an environment of its own, away from the sources: its contents, its command, its engine."""

import os
import shutil
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support import tiny

ROOT = Path(__file__).parents[1]
ROOMS = ("benchmarks", "common", "frontend", "kernels", "launcher", "scheduler_proc", "tasks", "worker_proc")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "results")
PROGRAM = """
from frontend import LLM, SamplingParams
with LLM({model!r}, num_kv_blocks=64, dtype="float32", cpu_threads=1) as llm:
    [output] = llm.generate("The sea", SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
    print(llm.client.tokenize("The sea " * 5000)[:2])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing is left among the sources."""
    pytest.importorskip("setuptools")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=LEFT_OUT)
    for name in ("launch.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-q",
        "-w",
        target,
    ]
    built = subprocess.run([*command, source], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    [path] = target.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def bin_dir(wheel, tmp_path_factory) -> Path:
    """Of an environment with the wheel installed, which borrows all dependencies from this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        folder / "bin" / "python",
        "install",
        "--no-deps",
        "--no-index",
        "-q",
    ]
    installed = subprocess.run([*command, wheel], capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model") / "tiny")


def run(program: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    """Run something of the environment, with nothing of ours on its path."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=cwd, env=variables)


def test_the_wheel_holds_every_module_and_all_data(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")} | {"launch.py"}
    assert {name for name in held if name.endswith(".py")} == modules
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    data = {
        str(path.relative_to(ROOT))
        for package, globs in patterns.items()
        for pattern in globs
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    assert held - modules == data
    assert {"kernels/tuning/skinny_linear.json", "benchmarks/models/qwen3-0.6b/config.json"} <= data


def test_all_data_that_the_code_lies_beside_is_in_the_wheel(wheel):
    """A file that a module reads and that no pattern of pyproject.toml names works here and is missing there."""
    held = set(zipfile.ZipFile(wheel).namelist())
    ours = subprocess.run(["git", "ls-files", *ROOMS], capture_output=True, text=True, cwd=ROOT, check=False)
    if ours.returncode:
        pytest.skip("not a git checkout")
    assert [
        name for name in ours.stdout.split() if name not in held and not name.startswith("benchmarks/results/")
    ] == []


def test_the_command_is_the_installed_one(bin_dir, tmp_path):
    version = run(bin_dir / "trireme", "--version", cwd=tmp_path)
    assert version.stdout.startswith("trireme "), version.stderr
    where = run(
        bin_dir / "python", "-c", "import launch, frontend; print(launch.__file__, frontend.__file__)", cwd=tmp_path
    )
    assert all(path.startswith(str(bin_dir.parent)) for path in where.stdout.split()), where.stdout
    keys = run(bin_dir / "trireme", "keys", tmp_path / "keys", cwd=tmp_path)
    assert keys.returncode == 0, keys.stderr
    refused = run(bin_dir / "trireme", "--prot", "1", cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (2, "trireme: unknown argument --prot; did you mean --port?\n")


def test_an_installed_engine_answers(bin_dir, model_dir, tmp_path):
    once = run(bin_dir / "trireme", "--once", "Hi", "--model", model_dir, "--cpu-threads", "1", cwd=tmp_path)
    assert once.returncode == 0, once.stderr
    assert once.stdout.strip(), "no answer"


def test_an_installed_llm_answers(bin_dir, model_dir, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.format(model=str(model_dir)))
    done = run(bin_dir / "python", "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("["), done.stdout

"""Where Python's bytecode is kept."""

import os
import py_compile
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from worker_proc import bytecode
from worker_proc.bytecode import FOLDER_NAME, compile_beside_import, keep_bytecode

IMPORT = """
import sys
import threading
from pathlib import Path
from worker_proc.bytecode import keep_bytecode
sys.path.insert(0, sys.argv[2])
keep_bytecode(Path(sys.argv[1]))
import torch
print(torch.__cached__)
"""


@pytest.fixture
def torch_folder(tmp_path):
    """A folder with a torch of one file, which has no bytecode."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("")
    return tmp_path / "site"


def files_of(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in folder.rglob("*.pyc"))


@pytest.mark.parametrize("is_forbidden", [True, False])
def test_bytecode_that_python_may_not_keep_beside_the_files_is_kept_in_the_folder(is_forbidden, torch_folder, tmp_path):
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1" if is_forbidden else ""}
    command = [sys.executable, "-c", IMPORT, str(tmp_path / "triton"), str(torch_folder)]
    cached = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(cached).is_file()
    assert files_of(torch_folder) == ([] if is_forbidden else ["__init__"])
    assert ("__init__" in files_of(tmp_path / "triton")) == is_forbidden


@pytest.fixture
def kept(torch_folder, tmp_path, monkeypatch):
    """kept() -> where this process would have its bytecode, if Python may not write it beside the files."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    spec = SimpleNamespace(origin=str(torch_folder / "torch" / "__init__.py"))
    monkeypatch.setattr(bytecode.importlib.util, "find_spec", lambda name: spec if name == "torch" else None)

    def ask():
        keep_bytecode(tmp_path / "triton")
        return sys.pycache_prefix

    return ask


def test_the_processes_it_starts_keep_it_there_too(kept, tmp_path):
    assert kept() == os.environ["PYTHONPYCACHEPREFIX"] == str(tmp_path / "triton" / FOLDER_NAME)
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ and not sys.dont_write_bytecode


@pytest.mark.parametrize("state", ["current", "without a date", "of another Python", "of an older file", "cut off"])
def test_bytecode_beside_the_files_is_used_if_an_import_would_use_it(kept, torch_folder, state):
    source = torch_folder / "torch" / "__init__.py"
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH if state == "without a date" else None
    beside = Path(py_compile.compile(str(source), invalidation_mode=mode))
    if state == "of another Python":
        beside.write_bytes(b"none" + beside.read_bytes()[4:])
    if state == "of an older file":
        source.write_text("new = True\n")
    if state == "cut off":
        beside.write_bytes(beside.read_bytes()[:9])
    assert (kept() is None) == (state in ("current", "without a date"))


def test_a_folder_that_the_user_has_chosen_is_kept(kept, monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", "chosen")
    assert kept() == "chosen" and os.environ["PYTHONPYCACHEPREFIX"] == ""


def test_where_nothing_can_be_written_nothing_changes(kept, tmp_path):
    (tmp_path / "triton").write_text("a file")
    assert kept() is None and sys.dont_write_bytecode


def test_without_torch_nothing_changes(kept, monkeypatch):
    monkeypatch.setattr(bytecode.importlib.util, "find_spec", lambda _: None)
    assert kept() is None


@pytest.fixture
def compiled(kept, torch_folder, monkeypatch):
    """compiled() -> the files that a process has compiled ahead of torch's import, once it has ended."""
    for name in ("nn/linear", "testing/checks", "nn/tests/checks", "wrong"):
        path = torch_folder / "torch" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("no Python" if name == "wrong" else "")

    def ask():
        compile_beside_import(2)
        for thread in threading.enumerate():
            if thread.name == "compile-bytecode":
                thread.join()
        return files_of(torch_folder.parent)

    return ask


def test_files_that_are_imported_are_compiled_by_a_process(compiled, kept, torch_folder):
    kept()
    assert compiled() == ["__init__", "linear"]
    assert files_of(torch_folder) == [], "they are kept in the folder"


def test_they_are_kept_beside_the_files_where_python_may_do_so(compiled, torch_folder, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert compiled() == files_of(torch_folder) == ["__init__", "linear"]


def test_nothing_is_compiled_that_python_may_not_keep(compiled):
    """Where the folder could not be written, files were compiled beside their sources all the same."""
    assert compiled() == []


def test_what_has_been_compiled_is_not_compiled_again(compiled, torch_folder, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    py_compile.compile(str(torch_folder / "torch" / "__init__.py"))
    assert compiled() == ["__init__"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the files are compiled to their end")
def test_what_compiles_them_ends_with_the_worker(torch_folder):
    """A worker that was killed left as many processes as there are cores behind."""
    compiling = f"""
import os, signal, sys
from worker_proc import bytecode
bytecode._compile = lambda _: (os.write(1, b"begun"), signal.pause())
sys.argv = ["", "1", "", {str(torch_folder)!r}]
bytecode.main()
"""
    starting = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {compiling!r}])"
    with subprocess.Popen([sys.executable, "-c", starting], stdout=subprocess.PIPE) as worker:
        assert worker.stdout.read(5) == b"begun"
        worker.kill()
        assert worker.stdout.read() == b"", "nobody holds it any more"

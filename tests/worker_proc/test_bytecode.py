"""Where Python's bytecode is kept."""

import os
import py_compile
import subprocess
import sys
import threading
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels.compile_process import CompileProcess
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
    monkeypatch.setattr(SourceFileLoader, "get_code", SourceFileLoader.get_code)
    spec = SimpleNamespace(origin=str(torch_folder / "torch" / "__init__.py"))
    monkeypatch.setattr(bytecode.importlib.util, "find_spec", lambda name: spec if name == "torch" else None)

    def ask():
        keep_bytecode(tmp_path / "triton")
        return sys.pycache_prefix

    return ask


COMPILES = """
import sys
from kernels import compile_process as process
process._import_kernels = lambda: print("kept in", sys.pycache_prefix, sys.dont_write_bytecode)
process.main()
"""


def test_the_process_that_compiles_kernels_keeps_it_there_too(kept, monkeypatch):
    """Python itself starts with what it had: with files from there that are cut off it could not."""
    own, commands = kept(), []
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
        CompileProcess(1).start()
    command = [sys.executable, "-c", COMPILES, *commands[0][3:]]
    told = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True).stderr
    assert f"kept in {own} False\n" in told
    assert os.environ["PYTHONPYCACHEPREFIX"] == "" and os.environ["PYTHONDONTWRITEBYTECODE"] == "1"


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
    assert kept() == "chosen" and sys.dont_write_bytecode


@pytest.mark.parametrize("way", ["a file", "a link", "writable by all", "by a group", "another's", "full", "read-only"])
def test_where_others_may_write_or_nobody_nothing_changes(kept, tmp_path, monkeypatch, way):
    """A folder that another user has put there, in a cache that all may write to, would be run as this user."""
    own = tmp_path / "triton" / FOLDER_NAME
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own.parent.mkdir()
    if way == "a file":
        own.write_text("")
    elif way == "a link":
        own.symlink_to(tmp_path / "elsewhere")
    else:
        own.mkdir()
        own.chmod({"writable by all": 0o777, "by a group": 0o770}.get(way, 0o700))
    if way == "another's":
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
        monkeypatch.setattr(Path, "lstat", lambda _: SimpleNamespace(st_mode=0o40_700, st_uid=54_321))
    if way == "full":
        monkeypatch.setattr(bytecode.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    if way == "read-only":
        monkeypatch.setattr(os, "access", lambda *_: False)
    assert kept() is None and sys.dont_write_bytecode


@pytest.mark.parametrize("owner", [0, 12_345])
def test_a_folder_with_torchs_bytecode_is_used_where_nothing_can_be_written(kept, compiled, monkeypatch, owner):
    """As in a container whose image has it."""
    kept()
    compiled()
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    monkeypatch.setattr(Path, "lstat", lambda _: SimpleNamespace(st_mode=0o40_755, st_uid=owner))
    assert kept() is not None


def test_nobody_else_may_write_where_it_is_kept_and_it_is_there_for_any_process(kept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bytecode, "FOLDER_NAME", "own")
    before = os.umask(0)
    try:
        keep_bytecode(Path("triton"))
    finally:
        os.umask(before)
    assert sys.pycache_prefix == str(tmp_path / "triton" / "own")
    assert (tmp_path / "triton" / "own").stat().st_mode & 0o777 == 0o700


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


@pytest.mark.parametrize("place", ["beside the files", "a folder that the user has chosen"])
def test_nothing_is_compiled_that_python_may_not_keep(compiled, tmp_path, monkeypatch, place):
    """Where the folder could not be written, files were compiled beside their sources all the same."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "chosen") if "chosen" in place else None)
    assert compiled() == []


def test_nothing_is_compiled_that_cannot_be_kept(compiled, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(os, "access", lambda *_: False)
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


@pytest.mark.parametrize("left", [17, 40, 1000, -1])
def test_what_a_full_disk_has_cut_off_is_compiled_anew(kept, torch_folder, tmp_path, left):
    """Each later start ended with "marshal data too short", until somebody deleted the folder."""
    kept()
    source = torch_folder / "torch" / "__init__.py"
    source.write_text("".join(f"def f{number}():\n    return {number}\n" for number in range(100)))
    beside = Path(py_compile.compile(str(source)))
    whole = beside.read_bytes()
    beside.write_bytes(whole[:left])
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": ""}
    command = [sys.executable, "-c", IMPORT, str(tmp_path / "triton"), str(torch_folder)]
    for is_whole in (False, True):
        subprocess.run(command, env=environment, check=True)
        assert beside.exists() == is_whole, "dropped by the import that found it, kept by the next one"
    assert beside.read_bytes() == whole

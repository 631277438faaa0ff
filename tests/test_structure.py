"""The rules of the code's shape: who may import whom, how long things may be, what may not be written.

Import boundaries are held twice: by reading every import statement, and by importing the rooms in a fresh interpreter
and looking at what was loaded.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tasks import file_list
from tasks.__main__ import smoke_benchmarks

ROOT = Path(__file__).parents[1]
ROOMS = ("common", "frontend", "scheduler_proc", "worker_proc", "kernels", "launcher")
SOURCES = sorted(
    path
    for pattern in ("*.py", *(f"{room}/**/*.py" for room in (*ROOMS, "benchmarks", "tasks", "tests", "examples")))
    for path in ROOT.glob(pattern)
)
FORBIDDEN = {
    "common": {"frontend", "scheduler_proc", "worker_proc", "kernels", "torch", "transformers", "numpy", "triton"},
    "frontend": {"scheduler_proc", "worker_proc", "kernels", "torch", "triton"},
    "scheduler_proc": {"frontend", "worker_proc", "kernels", "torch", "transformers", "numpy", "triton"},
    "worker_proc": {"frontend", "scheduler_proc"},
    "kernels": {"common", "frontend", "scheduler_proc", "worker_proc"},
    "launcher": {"scheduler_proc", "worker_proc", "kernels", "torch", "transformers", "numpy", "triton"},
}
FUNCTION_LINE_LIMIT = 70
FILE_LINE_LIMIT = 500


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.partition(".")[0]


def loaded_by(statement: str) -> set[str]:
    """Top-level names of everything that a statement loads in a fresh interpreter."""
    script = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, f"{statement!r} failed:\n{run.stderr}"
    return set(run.stdout.split())


def modules_of(room: str) -> list[str]:
    names = []
    for path in sorted((ROOT / room).rglob("*.py")):
        if path.name != "__main__.py":
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            names.append(name.removesuffix(".__init__"))
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_names_what_it_must_not_know(room: str):
    wrong = [
        f"{relative(path)}:{line} imports {name}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for line, name in imported_names(parsed(path))
        if name in FORBIDDEN[room]
    ]
    assert wrong == []


@pytest.mark.parametrize("room", ["common", "scheduler_proc"])
def test_light_rooms_load_nothing_heavy(room: str):
    loaded = loaded_by("import " + ", ".join(modules_of(room)))
    assert loaded & FORBIDDEN[room] == set()


def test_the_client_sdk_loads_nothing_that_a_client_does_not_need():
    loaded = loaded_by("from frontend import AsyncClient, Client, SamplingParams")
    heavy = {"torch", "transformers", "tokenizers", "numpy", "starlette", "uvicorn", "msgspec", "yaml"}
    assert loaded & heavy == set()


def test_the_in_process_class_needs_no_http_package():
    assert loaded_by("from frontend import LLM") & {"torch", "transformers", "starlette", "uvicorn"} == set()


def test_the_supervisor_loads_nothing_heavy():
    loaded = loaded_by("import launch, launcher.command")
    heavy = {"torch", "transformers", "numpy", "frontend", "scheduler_proc", "worker_proc", "yaml"}
    assert loaded & heavy == set()


def test_every_public_name_of_a_benchmark_says_what_it_is():
    wrong = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        for body in [parsed(path).body]
        for node in [*body, *(member for kind in body if isinstance(kind, ast.ClassDef) for member in kind.body)]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not node.name.startswith("_") and ast.get_docstring(node) is None
    ]
    assert wrong == []


@pytest.mark.parametrize("room", (*ROOMS, "benchmarks", "tasks"))
def test_no_module_imports_the_private_names_of_another(room: str):
    wrong = [
        f"{relative(path)}:{node.lineno} imports {alias.name} of {node.module}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert wrong == []


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_file_reads_well(path: Path):
    text = path.read_text()
    tree = parsed(path)
    assert text.count("\n") <= FILE_LINE_LIMIT, f"{relative(path)} has more than {FILE_LINE_LIMIT} lines"
    long = [
        f"{relative(path)}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINE_LIMIT
        and not is_kernel(node)
    ]
    assert long == []
    if text:
        assert ast.get_docstring(tree), f"{relative(path)} has no module docstring"


def test_every_public_function_of_a_room_says_what_it_returns():
    wrong = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is None and not is_kernel(node)
    ]
    assert wrong == []


def committed_texts() -> list[Path]:
    run = subprocess.run(["git", "ls-files", "-z"], capture_output=True, cwd=ROOT, check=False)
    if run.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in run.stdout.decode().split("\0") if name]
    return [
        path
        for path in paths
        if path.suffix in {".py", ".md", ".toml", ".json", ".jsonl", ".html", ""} and path.is_file()
    ]


def test_nothing_names_the_machine_it_was_written_on():
    home_paths = re.compile(r"(?<![\w.])/(?:root|home/\w+|Users/\w+|work|workspace)/\w")
    wrong = [
        f"{relative(path)}:{number}: {line.strip()[:100]}"
        for path in committed_texts()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if home_paths.search(line)
    ]
    assert wrong == []


def test_no_text_was_committed_with_both_sides_of_a_merge():
    marker = re.compile(r"^(?:<{7}|>{7}|\|{7}) ", re.MULTILINE)
    assert [relative(path) for path in committed_texts() if marker.search(path.read_text(errors="replace"))] == []


def test_the_bench_verb_finds_the_benchmarks():
    assert "benchmarks.throughput" in smoke_benchmarks(ROOT)


def test_the_list_of_files_is_current():
    text = file_list.DOCUMENT.read_text()
    assert text == file_list.updated(text), "docs/structure.md is out of date: run python -m tasks fix"


def test_made_up_examples_are_the_same_each_time_and_may_take_theirs(request):
    """Those of tests/common had 200 ms each: they were imported before the profile without a deadline was loaded."""
    for item in request.session.items:
        function = getattr(item, "function", None)
        if hypothesis.is_hypothesis_test(function):
            settings = getattr(function, "_hypothesis_internal_use_settings", None) or hypothesis.settings.default
            assert (settings.deadline, settings.derandomize) == (None, True), item.nodeid


@pytest.mark.parametrize("path", [path for path in SOURCES if path.is_relative_to(ROOT / "tests")], ids=relative)
def test_no_request_to_a_real_server_has_the_librarys_five_seconds(path):
    """On a busy machine that was too little for a long text that had a process started for it."""
    hasty = [
        node.lineno
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "httpx"
        and node.func.attr in ("get", "post", "stream", "request", "Client", "AsyncClient")
        and not {"timeout", "transport"} & {keyword.arg for keyword in node.keywords}
    ]
    assert hasty == []

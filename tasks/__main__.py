"""Runs a verb: `fix` (format, repair), `check` (lint, types, structure), `test` (all tests), `bench` (smoke sizes).

Whatever follows the verb goes to the last command: `python -m tasks test -k cli -x`. Ends with the exit code of the
first command that failed.
"""

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

VERBS = {
    "fix": ["ruff check --fix", "ruff format", "tasks.result_order", "tasks.file_list"],
    "check": ["ruff check", "ruff format --check", "mypy", "pytest -q tests/test_structure.py"],
    "test": ["pytest"],
}


def commands(verb: str) -> list[list[str]]:
    """The modules to run, with their arguments."""
    if verb == "bench":
        return [[module, "--smoke"] for module in smoke_benchmarks(ROOT)]
    return [line.split() for line in VERBS[verb]]


def smoke_benchmarks(root: Path) -> list[str]:
    """The benchmarks that have a smoke size and need no GPU."""
    files = sorted((root / "benchmarks").glob("*.py"))
    return [f"benchmarks.{file.stem}" for file in files if '"--smoke"' in file.read_text()]


def main(arguments: list[str]) -> int:
    """Run the verb's commands in order, up to the first that fails; returns its exit code."""
    if not arguments or arguments[0] not in (*VERBS, "bench"):
        print(f"usage: python -m tasks {'|'.join((*VERBS, 'bench'))} [arguments]", file=sys.stderr)
        return 2
    lines = commands(arguments[0])
    lines[-1] += arguments[1:]
    for line in lines:
        print("+ python -m", shlex.join(line), flush=True)
        code = subprocess.run([sys.executable, "-m", *line], cwd=ROOT, check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Keeps the list of files in docs/structure.md: one line per file, the first sentence of its docstring.

`python -m tasks.file_list` (part of the verb `fix`) writes it; a test of the structure says when it is out of date.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "structure.md"
ROOMS = ("launcher", "common", "frontend", "scheduler_proc", "worker_proc", "kernels", "benchmarks", "tasks")
BEGIN = "<!-- files: written by `python -m tasks fix` -->\n"
END = "<!-- end of files -->\n"


def file_list(root: Path = ROOT) -> str:
    """The list as Markdown."""
    sections = [f"- `launch.py`: {first_line(root / 'launch.py')}\n"]
    for room in ROOMS:
        files = sorted((root / room).rglob("*.py"))
        lines = [f"- `{file.relative_to(root)}`: {first_line(file)}\n" for file in files if file.name != "__init__.py"]
        sections.append(f"\n### {room}\n\n{first_line(root / room / '__init__.py')}\n\n" + "".join(lines))
    return "".join(sections)


def first_line(file: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def updated(text: str) -> str:
    """The document with the list as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + file_list() + "\n" + END + after


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text()))
    sys.exit(0)

"""Keeps benchmarks/results in order, newest line last: branches that both add lines leave them otherwise when merged.

`python -m tasks.result_order` (part of the verb `fix`) sorts; a test says when a file is out of order.
"""

import json
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def in_order(text: str) -> str:
    """The lines by date; those of one day or second stay as they are."""
    lines = text.splitlines(keepends=True)
    return "".join(sorted(lines, key=lambda line: json.loads(line)["date"]))


if __name__ == "__main__":
    for file in RESULTS.glob("*.jsonl"):
        before = file.read_text()
        if (after := in_order(before)) != before:
            file.write_text(after)
    sys.exit(0)

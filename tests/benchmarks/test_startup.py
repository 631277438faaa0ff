"""What the benchmark of starts makes of a program that it starts; the program is a stand-in."""

import pytest

from benchmarks import startup

COUNTS_STARTS = """
import os, sys
from pathlib import Path
starts = Path(os.environ["TRITON_CACHE_DIR"]) / "starts"
starts.write_text("x" + (starts.read_text() if starts.exists() else ""))  # %d
print("a warning")
print("blocks", len(starts.read_text()), flush=True)
sys.stdin.read()
"""


def test_the_second_start_finds_what_the_first_left(monkeypatch):
    monkeypatch.setattr(startup, "ENGINE", COUNTS_STARTS)
    for _ in range(2):  # each measurement begins with an empty folder
        found = startup.measure("default", {})
        assert found["kv_blocks"] == 1
        assert found["first_s"] > 0
        assert found["next_s"] > 0


@pytest.mark.parametrize("program", ["import sys; sys.exit(%d and 3)", "print('blocks', %d); raise SystemExit(3)"])
def test_an_engine_that_fails_is_not_a_figure(program, monkeypatch):
    monkeypatch.setattr(startup, "ENGINE", program)
    with pytest.raises(RuntimeError, match="code 3"):
        startup.measure("default", {})

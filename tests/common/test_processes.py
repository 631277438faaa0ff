"""Processes as the supervisor starts them."""

import subprocess
import sys
import time

import pytest

SCRIPT = """
import subprocess, sys
from common.processes import open_standard_files
open_standard_files()
with open(sys.argv[1], "w") as file:
    subprocess.run([sys.executable, "-c", "import os; print(os.write(1, b'x'), os.write(2, b'x'))"], check=True)
    print("out")
    print("err", file=sys.stderr)
    file.write(f"{file.fileno() > 2} {sys.stdin.read()!r}")
"""


@pytest.mark.parametrize("closed", [(0, 1, 2), (1,), (0, 2), ()], ids=str)
def test_no_file_gets_the_number_of_a_closed_standard_file(tmp_path, closed):
    """The run directory's lock file did, and the log went into it."""
    path = tmp_path / "file"
    closing = " ".join(f"{number}>&-" for number in closed)
    command = ["sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-c", SCRIPT, str(path)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, path.read_text()) == (0, "True ''"), ended.stderr
    assert ended.stdout.endswith(b"out\n") == (1 not in closed)
    assert ended.stderr.endswith(b"err\n") == (2 not in closed)


def test_what_a_shell_did_before_it_became_the_program_does_not_count():
    """`sh -c 'pip install -e . && python launch.py'` reported the installation's time as the engine's start."""
    timed = "from common.processes import seconds_since_start as since; print(since())"
    script = '"$0" -c pass && echo done && read line && exec "$0" -c "$1"'
    with subprocess.Popen(
        ["sh", "-c", script, sys.executable, timed], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.stdout.readline() == "done\n"
        before_s = time.monotonic()
        reported, _ = shell.communicate("go\n", timeout=60)
        assert 0 < float(reported) < time.monotonic() - before_s

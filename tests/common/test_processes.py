"""Processes as the supervisor starts them."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from common import processes
from common.processes import Child, DeathPipe, last_error_line
from tests.support.processes import has_ended

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


HEIR = """
import ctypes, os, subprocess, sys
from common.processes import reap_orphans
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER: as process 1 does, inherit orphans
reap_orphans([])
own = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(5)"], stdin=subprocess.PIPE)
start = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
orphans = [int(subprocess.run([sys.executable, "-c", start], capture_output=True, check=True).stdout) for _ in "ab"]
for pid in orphans:
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and waits to be noticed
reap_orphans([own.pid])
assert not any(os.path.exists(f"/proc/{pid}") for pid in orphans)
own.stdin.close()
os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
reap_orphans([own.pid])
assert own.wait() == 5
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere orphans go to process 1 alone")
def test_what_a_lost_child_leaves_is_taken_note_of_and_no_childs_end_is_lost():
    """In a container, each restart of the frontend left a zombie."""
    ended = subprocess.run([sys.executable, "-c", HEIR], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_what_two_children_write_is_not_mixed_where_our_stderr_takes_it_in_parts(monkeypatch):
    written, both = bytearray(), threading.Barrier(2, timeout=60)

    def write_a_byte(_: int, data: bytes) -> int:
        written.extend(data[:1])
        os.sched_yield()
        return 1

    def pass_on(data: bytes) -> None:
        both.wait()
        processes._write_stderr(data)

    monkeypatch.setattr(processes.os, "write", write_a_byte)
    threads = [threading.Thread(target=pass_on, args=(letter * 5_000 + b"\n",)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {line.strip(line[:1]) for line in bytes(written).splitlines()} == {b""}


def run_child_script(script: str, **keywords: object) -> Child:
    return Child("child", ["-c", script], DeathPipe(), **keywords)


def test_a_childs_grandchildren_end_with_it():
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    child = run_child_script(script, capture_stdout=True)
    pid = int(child._process.stdout.readline())
    child.kill()
    child.close()
    assert wait_for(lambda: has_ended(pid))


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True


def test_what_a_child_writes_reaches_our_stderr(capfd):
    child = run_child_script("import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(4)")
    child._process.wait()
    assert child.describe_end() == "child ended with exit code 4: err"
    child.close()
    assert sorted(capfd.readouterr().err.split()) == ["err", "out"]


def test_the_last_line_of_a_child_that_ended_well_is_no_reason():
    """SIGTERM to a worker showed its last INFO line as what had gone wrong."""
    child = run_child_script("import sys; print('INFO all is well', file=sys.stderr)")
    child._process.wait()
    assert child.describe_end() == "child ended with exit code 0 unexpectedly"
    child.close()


def test_the_last_error_line_of_a_traceback():
    text = 'Traceback (most recent call last):\n  File "x.py", line 1\n    1/0\nZeroDivisionError: division by zero\n\n'
    assert last_error_line(text) == "ZeroDivisionError: division by zero"
    assert last_error_line("") == ""

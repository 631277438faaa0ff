"""A running engine for tests: real processes, started through launch.py as a user would."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import zmq

from common.run_dir import write_atomically
from tests.support.faulty_engine import GATE_VARIABLE

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 90
STOP_TIMEOUT_S = 30


class Server:
    """`python launch.py serve` with a model folder and options; a context manager that stops it.

    Args:
        model_dir: what it serves.
        options: of `serve`.
        faulty: run `tests.support.faulty_engine`, whose processes fail when a signal tells them, and wait at a gate.

    Attributes:
        model_dir: what it serves.
        process: the supervisor.
        ready: what it wrote when it was ready: `client_endpoint`, `http`, `pid`.
    """

    def __init__(self, model_dir: Path | str, *options: str, faulty: bool = False) -> None:
        self._log: str | None = None
        self.model_dir = model_dir
        self.folder = Path(tempfile.mkdtemp(prefix="tt-"))
        self.ready: dict = {}
        self.stderr_path = self.folder / "stderr"
        self.run_dirs = self.folder / "r"
        self.run_dirs.mkdir(mode=0o700)
        self._stderr = self.stderr_path.open("w")
        self._gate = self.folder / "gate"
        entry = ["-m", "tests.support.faulty_engine"] if faulty else [ROOT / "launch.py"]
        self.process = subprocess.Popen(
            [sys.executable, *entry, "serve", "--model", model_dir, "--port", "0", "--cpu-threads", "1",
             "--ready-file", self.folder / "ready.json", *options],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=ROOT if faulty else None,
            env={**os.environ, "XDG_RUNTIME_DIR": str(self.run_dirs), GATE_VARIABLE: str(self._gate)},
        )  # fmt: skip

    def wait_until_ready(self) -> "Server":
        """Block until the engine can serve; fails with its log if it ends before."""
        line = self.process.stdout.readline()
        assert line, f"ended with {self.process.wait()} before it was ready:\n{self.stderr()}"
        self.ready = json.loads((self.folder / "ready.json").read_text())
        return self

    def __enter__(self) -> "Server":
        return self.wait_until_ready()

    def __exit__(self, *_: object) -> None:
        self.close()

    def stderr(self) -> str:
        """What the engine has logged so far; after `close`, all that it ever did."""
        return self.stderr_path.read_text() if self._log is None else self._log

    def wait_for_line(self, pattern: str) -> None:
        """Block until a line of the log matches; fails with the log if the engine ends before."""
        while not re.search(pattern, self.stderr()):
            assert self.process.poll() is None, self.stderr()
            os.sched_yield()

    def children(self) -> dict[str, int]:
        """Process ids of the engine's processes by name, as an operator sees them (`frontend`, `worker-0`, ...)."""
        return children_of(self.process.pid)

    def hold(self, step_count: int) -> None:
        """Let a faulty engine's worker take so many steps, counted from the first call on, and then wait; a worker that
        is started again waits at once."""
        write_atomically(self._gate, str(step_count))

    def go_on(self) -> None:
        """Let it run freely."""
        self._gate.unlink()

    def stop(self) -> int:
        """Ask the engine to stop, as Ctrl-C does; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_TIMEOUT_S)

    def close(self) -> None:
        """End whatever is left, however, and remove the folder."""
        pids = _descendants_of(self.process.pid)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.stdout.close()
        self.process.wait()
        self._stderr.close()
        for pid in pids:
            if "trireme" in _read(Path(f"/proc/{pid}/cmdline")):
                with contextlib.suppress(ProcessLookupError):  # it ends just now
                    os.kill(pid, signal.SIGKILL)
        self._log = self.stderr()
        shutil.rmtree(self.folder)

    def assert_nothing_is_left(self, pids: dict[str, int]) -> None:
        """No process of the engine lives, and its run directory is gone."""
        for name, pid in pids.items():
            wait_for_exit(pid, name)
        assert list(self.run_dirs.rglob("*.sock")) == []


def children_of(pid: int) -> dict[str, int]:
    """Process ids of the engine's processes that a process has started, by name."""
    found = {}
    for child in _children_of(pid):
        title = _read(Path(f"/proc/{child}/cmdline")).split("\0")[0]
        if title.startswith("trireme-"):
            found[title.removeprefix("trireme-")] = child
    return found


def wait_for_exit(pid: int, name: str = "process", timeout_s: float = 10) -> None:
    """Block until a process that is not our child has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poller = zmq.Poller()
    poller.register(fd, zmq.POLLIN)
    ended = poller.poll(timeout_s * 1000)
    os.close(fd)
    assert ended, f"{name} (pid {pid}) still runs after {timeout_s} s"


def _children_of(pid: int) -> list[int]:
    return [int(child) for child in _read(Path(f"/proc/{pid}/task/{pid}/children")).split()]


def _descendants_of(pid: int) -> list[int]:
    children = _children_of(pid)
    return children + [grandchild for child in children for grandchild in _descendants_of(child)]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""

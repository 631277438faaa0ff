"""A child process from its parent's side: start it so that it dies with us, pass on its stderr, explain its end.

Also has the pipe that interrupts the supervisor's wait. Used by the supervisor and by whoever starts further processes;
the child's half (death watch, control link) is in `common.child`.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from common import log
from common.child import DEATH_PIPE_VARIABLE
from common.errors import StartupError

FILE_LIMIT = 65_536
_TAIL_LIMIT_BYTES = 16384
_ROOT = Path(__file__).resolve().parent.parent
_LOADED_S, _COMPUTED_S = time.monotonic(), time.process_time()
_stderr_lock = threading.Lock()
"""Held while what a child wrote is passed on: a full pipe takes it in parts, with others' between them."""


class DeathPipe:
    """A pipe whose writing end only this process holds: children that hold the other end see when we are gone."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()

    def close(self) -> None:
        """Close both ends: children that still live end themselves."""
        os.close(self.read_fd)
        os.close(self._write_fd)


class Child:
    """One process, running since the object was made.

    It leads its own session, so that Ctrl-C in a terminal reaches only the supervisor, and `kill` takes whatever it
    started along. What it writes goes to our stderr at once; the end of it is kept for `describe_end`.

    Args:
        name: what messages call it.
        arguments: what follows the Python interpreter on its command line.
        death_pipe: ours.
        variables: additional environment variables.
        inherited_fds: file descriptors that it keeps, beside the death pipe.
        capture_stdout: keep stdout for `read_stdout` instead of showing it; for short outputs.

    Raises:
        StartupError: the system has no memory, file descriptor or process left for it.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        death_pipe: DeathPipe,
        *,
        variables: Mapping[str, str] | None = None,
        inherited_fds: Sequence[int] = (),
        capture_stdout: bool = False,
    ) -> None:
        self.name = name
        try:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if capture_stdout else subprocess.STDOUT,
                env=_environment(death_pipe) | dict(variables or {}),
                pass_fds=[death_pipe.read_fd, *inherited_fds],
                start_new_session=True,
            )
        except OSError as error:
            raise StartupError(f"cannot start {name}: {error.strerror or error}") from None
        self.exit_fd = _open_pidfd(self._process.pid)
        """Readable once the process has ended; -1 where the system has no such thing, then `ended` must be polled."""
        self._tail = b""
        self._shown = self._process.stderr if capture_stdout else self._process.stdout
        self._relay = threading.Thread(target=self._pass_stderr_on, name=f"stderr-{name}", daemon=True)
        self._relay.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ended(self) -> bool:
        """Whether it has ended; does not wait."""
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False if it still runs after that."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def exit_code(self) -> int | None:
        """Exit code, minus the signal's number if a signal ended it, None while it runs."""
        return self._process.poll()

    def read_stdout(self) -> str:
        """All it wrote to stdout (only with `capture_stdout`, after its end)."""
        assert self._process.stdout is not None, "stdout is always piped"
        with self._process.stdout as pipe:
            return pipe.read().decode(errors="replace")

    def kill(self) -> None:
        """End it and its session at once, and reap it; idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Give its file descriptors back, once it has ended."""
        self._relay.join(timeout=1.0)
        if self.exit_fd >= 0:
            os.close(self.exit_fd)
            self.exit_fd = -1
        if self._process.stdout and self._process.stdout is not self._shown:
            self._process.stdout.close()

    def describe_end(self, last_message: str = "") -> str:
        """One line that says how it ended and why.

        Args:
            last_message: what it said itself, if it did.
        """
        code = self.exit_code
        if last_message:
            return f"{self.name} failed: {last_message}"
        if code is not None and code < 0:
            hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
            return f"{self.name} was killed by signal {-code} ({signal.Signals(-code).name}){hint}"
        if code == 0:  # told by somebody else, by a signal as a rule; its last line says nothing of it
            return f"{self.name} ended with exit code 0 unexpectedly"
        self._relay.join(timeout=1.0)
        last_line = last_error_line(self._tail.decode(errors="replace"))
        return f"{self.name} ended with exit code {code}" + (f": {last_line}" if last_line else "")

    def _pass_stderr_on(self) -> None:
        assert self._shown is not None, "what is shown is always piped"
        with self._shown as pipe:
            lines = log.ForeignLines(self.name) if log.is_json() else None
            while data := os.read(pipe.fileno(), 65536):
                self._tail = (self._tail + data)[-_TAIL_LIMIT_BYTES:]
                _write_stderr(data if lines is None else lines.feed(data))
            if lines is not None:
                _write_stderr(lines.end())


def _write_stderr(data: bytes) -> None:
    with _stderr_lock, contextlib.suppress(OSError):  # it may be gone; a child must not block on it
        while data:
            data = data[os.write(2, data) :]


class Wakeup:
    """What interrupts the supervisor's wait: signals, and threads that call `poke`."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self.signals: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._on_signal)

    def poke(self) -> None:
        """End the wait that is under way, or the next one."""
        with contextlib.suppress(OSError):
            os.write(self._write_fd, b"x")

    def clear(self) -> None:
        """Forget the pokes so far."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass

    def _on_signal(self, number: int, _: object) -> None:
        self.signals.append(number)
        self.poke()


def seconds_since_start() -> float:
    """How long this program has run, the interpreter's own start included, as the time that it computed.

    When the process began says less: it may have been a shell, which did other work and then became this program.
    """
    return _COMPUTED_S + time.monotonic() - _LOADED_S


def reap_orphans(own: Collection[int]) -> None:
    """Take note of the ends of processes that a lost child had started: as process 1 of a container we inherit them.

    Args:
        own: process ids of the children that we have started ourselves, whose ends `Child` takes note of.
    """
    with contextlib.suppress(ChildProcessError):  # there are none at all
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own:
                return
            os.waitpid(ended.si_pid, 0)


def open_standard_files() -> None:
    """Open /dev/null for stdin, stdout and stderr where they are closed.

    Otherwise the next files opened get their numbers, and are written to by whatever prints.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def discard_stdout() -> None:
    """Let what is written to stdout from now on, or still waits there, go nowhere: its reader is gone."""
    fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(fd, sys.stdout.fileno())
    os.close(fd)


def raise_file_limit() -> None:
    """Let this process and its children open as many files as they may: every client connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILE_LIMIT if hard == resource.RLIM_INFINITY else min(hard, FILE_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def last_error_line(text: str) -> str:
    """What the last line of a stderr text says that is not blank or indented: of a traceback, the one that names the
    error."""
    lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip() and not line[0].isspace()]
    return log.said(lines[-1].strip())[:1000] if lines else ""


def _environment(death_pipe: DeathPipe) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path, DEATH_PIPE_VARIABLE: str(death_pipe.read_fd)}


def _open_pidfd(pid: int) -> int:
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return -1

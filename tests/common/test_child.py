"""A child process starts, reports, obeys and dies with its supervisor: real processes, a real control socket."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from common.child import DEATH_PIPE_VARIABLE
from common.config import EngineConfig, ServerOptions
from common.messages import Failed, ForSupervisor, Heartbeat, Ready, Stop, decode_for_supervisor
from common.sockets import bind_router, new_context

ROOT = Path(__file__).parents[2]
ROOM = """
import select, signal, threading
from concurrent.futures import ThreadPoolExecutor
from common import child
from common.child import run_child
from common.errors import ConfigError, StartupError

def main(config, link, rank):
    how = {how!r}
    if how == "config":
        raise ConfigError("no such model: /nowhere")
    if how == "startup":
        raise StartupError("not in time")
    if how == "crash":
        raise ZeroDivisionError("oops")
    if how == "stuck":  # the interpreter's shutdown waits for the thread
        ThreadPoolExecutor(1).submit(threading.Event().wait)
        raise RuntimeError("CUDA error: an illegal memory access was encountered\\nCompile with ...")
    if how == "no memory":
        raise MemoryError
    link.ready("here")
    if how == "hang":
        signal.pause()
    while True:
        select.select([link.wake_fd], [], [])
        if link.take_orders():
            return 0

child.HANG_TIMEOUTS_S["scheduler"] = 1
child.TURN_INTERVAL_BEATS = 1
run_child("scheduler", main)
"""


class Harness:
    """A supervisor's socket and one child."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = new_context()
        self.config = EngineConfig(run_dir=str(folder), server=ServerOptions(shutdown_timeout=1))
        self.socket = bind_router(self.context, self.config.endpoint("supervisor"))
        self.pipe = os.pipe()
        self.child: subprocess.Popen[str] | None = None

    def start(self, how: str) -> "subprocess.Popen[str]":
        (self.folder / "room.py").write_text(ROOM.format(how=how))
        (self.folder / "config.json").write_text(self.config.to_json())
        self.child = subprocess.Popen(
            [sys.executable, self.folder / "room.py", "--config", self.folder / "config.json"],
            env={**os.environ, "PYTHONPATH": str(ROOT), DEATH_PIPE_VARIABLE: str(self.pipe[0])},
            pass_fds=[self.pipe[0]],
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.child

    def receive(self, kind: type) -> ForSupervisor:
        while True:
            assert self.socket.poll(20_000), f"no {kind.__name__} within 20 s"
            identity, data = self.socket.recv_multipart()
            assert identity == b"scheduler"
            message = decode_for_supervisor(data)
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
        for fd in self.pipe:
            try:
                os.close(fd)
            except OSError:
                assert fd == self.pipe[1], "only the writing end may have been closed by a test"
        self.socket.close()
        self.context.term()


@pytest.fixture
def harness(tmp_path):
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def test_a_child_reports_and_stops_when_told(harness):
    child = harness.start("serve")
    assert harness.receive(Ready) == Ready("scheduler", "here")
    assert harness.receive(Heartbeat).state == "serving"
    harness.socket.send_multipart([b"scheduler", Stop(1000).to_wire()])
    assert child.wait(20) == 0


def test_a_child_survives_bad_bytes_from_its_supervisor(harness):
    child = harness.start("serve")
    harness.receive(Ready)
    harness.socket.send_multipart([b"scheduler", b"\xc1"])
    harness.socket.send_multipart([b"scheduler", Stop(1000).to_wire()])
    assert child.wait(20) == 0


def test_a_main_loop_that_hangs_ends_the_process_and_shows_where(harness):
    child = harness.start("hang")
    harness.receive(Ready)
    assert harness.receive(Failed).message == "its main loop has not turned for 1 s; its stack is on stderr"
    assert child.wait(20) == 1
    assert "in main\n" in child.stderr.read()


def test_a_main_loop_without_work_is_no_hang(harness):
    child = harness.start("serve")
    for _ in range(6):  # three seconds of heartbeats, where one would be a hang
        assert harness.receive(Heartbeat).process == "scheduler"
    harness.socket.send_multipart([b"scheduler", Stop(1000).to_wire()])
    assert child.wait(20) == 0


def test_sigterm_is_the_order_to_stop_and_sigint_is_not(harness):
    child = harness.start("serve")
    harness.receive(Ready)
    child.send_signal(signal.SIGINT)
    harness.receive(Heartbeat)
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("config", 2, "no such model: /nowhere"),
        ("startup", 3, "not in time"),
        ("crash", 1, "ZeroDivisionError: oops"),
        ("stuck", 1, "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("no memory", 1, "MemoryError"),
    ],
)
def test_a_failure_is_reported_before_the_exit(harness, how, code, message):
    child = harness.start(how)
    assert harness.receive(Failed) == Failed("scheduler", message)
    assert child.wait(20) == code


def test_the_last_words_wait_for_a_supervisor_that_is_held_up(harness):
    """It said that the child had ended with exit code 2, and not why: nobody logs what the supervisor is to print."""
    endpoint = harness.config.endpoint("supervisor")
    harness.socket.unbind(endpoint)
    child = harness.start("config")
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(1.5)
    harness.socket.bind(endpoint)
    assert harness.receive(Failed) == Failed("scheduler", "no such model: /nowhere")
    assert child.wait(20) == 2


def test_a_child_dies_when_the_supervisors_pipe_closes(harness):
    child = harness.start("serve")
    harness.receive(Ready)
    os.close(harness.pipe[1])
    assert child.wait(20) == -signal.SIGKILL


def test_the_control_socket_is_private_to_the_user(harness):
    path = Path(harness.config.endpoint("supervisor").removeprefix("ipc://"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert harness.socket.get(zmq.LINGER) == 0

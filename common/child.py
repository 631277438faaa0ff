"""What all child processes have in common: how they start, their link to the supervisor, how they end.

A child is started as `python -m <room> --config FILE [--rank N]`. `run_child` gives it a process title, logging, a
death watch (the child ends at once when the supervisor is gone, whatever killed it) and a `SupervisorLink`, and turns
the outcome of the room's `main` into an exit code:

    0  stopped as told        1  failed, traceback in the log
    2  ConfigError            3  StartupError

After an error the process ends without the interpreter's own shutdown, which might hang.

The link's thread sends a heartbeat twice a second and receives the supervisor's orders. A process that is stopped or
frozen misses its heartbeats. A main loop that hangs does not stop them, so the thread also wakes the loop every few
seconds. If the loop does not take its orders for `HANG_TIMEOUTS_S`, the thread writes the stack of every thread to
stderr, tells the supervisor, and ends the process. SIGTERM counts as the order to stop. SIGINT is ignored here, because
the supervisor gets it too.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import setproctitle
import zmq

from common import log
from common.config import EngineConfig, in_session
from common.errors import ConfigError, StartupError, TriremeError, WireError, exit_code, first_line
from common.messages import Failed, ForChild, Heartbeat, Profile, Ready, Stop, decode_for_child
from common.sockets import connect_dealer, new_context

HEARTBEAT_INTERVAL_MS = 500
TURN_INTERVAL_BEATS = 10
"""After how many heartbeats without a sign of it the main loop is woken to give one."""
HANG_TIMEOUTS_S = {"frontend": 60, "scheduler": 60, "worker": 300}
"""How long a main loop may not turn while it serves; a worker's turn is a step, which on a CPU may take minutes."""
LAST_WORDS_S = 10.0
"""How long a process that ends waits until its last message is on its way: its supervisor may just be held up."""
READING_VOCABULARY = "reading the vocabulary"
"""The state of a scheduler that may miss heartbeats because llguidance holds the interpreter."""
DEATH_PIPE_VARIABLE = "TRIREME_DEATH_PIPE"
"""Environment variable with the number of the inherited pipe end that closes when the supervisor is gone."""

_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


class SupervisorLink:
    """The child's end of the control link.

    The main loop adds to `progress`, polls `wake_fd` beside its sockets, and calls `take_orders` when it is readable.
    Everything else happens in the link's own thread.

    Args:
        process: this process's name, such as `scheduler` or `worker-0`.
        endpoint: the supervisor's endpoint.
        hang_timeout_s: how long the main loop may leave its orders while it serves.
        session: tells this process from the lost ones of the same name.

    Attributes:
        progress: counts steps or messages, for whoever looks at the heartbeats; nothing depends on it.
        state: `starting`, `serving`, `stopping`, `failed` or that of a trace.
    """

    def __init__(self, process: str, endpoint: str, hang_timeout_s: float = 300, session: int = 0) -> None:
        self.progress = 0
        self.state = "starting"
        self._hang_timeout_s = hang_timeout_s
        self._beats_without_turn = 0
        self._process = process
        self._identity = in_session(process, session)
        self._endpoint = endpoint
        self._orders: queue.SimpleQueue[ForChild] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.wake_fd, self._wake_main_fd = _wake_pipe()
        self._wake_link_fd, self._wake_thread_fd = _wake_pipe()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="supervisor-link", daemon=True)
        self._thread.start()

    def ready(self, detail: str) -> None:
        """Tell the supervisor that this process can serve."""
        self.state = "serving"
        self._send(Ready(self._process, detail).to_wire())

    def failed(self, message: str) -> None:
        """Tell the supervisor why this process is about to end."""
        self.state = "failed"
        self._send(Failed(self._process, message[:4000]).to_wire())

    def set_state(self, state: str) -> None:
        """Change the state and tell the supervisor at once."""
        self.state = state
        _poke(self._wake_thread_fd)

    def profile(self, order: Profile) -> None:
        """Have the supervisor pass an order on to the process it names."""
        self._send(order.to_wire())

    def wake(self) -> None:
        """Wake the main loop (from another thread)."""
        _poke(self._wake_main_fd)

    def order(self, order: ForChild) -> None:
        """Put an order in the queue, as if the supervisor had sent it (also from a signal handler)."""
        self._orders.put(order)
        self.wake()

    def take_orders(self) -> list[ForChild]:
        """The orders that have come since the last call; clears `wake_fd`. Shows that the main loop turns."""
        self._beats_without_turn = 0
        _drain(self.wake_fd)
        orders = []
        while not self._orders.empty():
            orders.append(self._orders.get())
        return orders

    def close(self) -> None:
        """Send what is still queued and end the thread."""
        self._closing = True
        _poke(self._wake_thread_fd)
        self._thread.join(timeout=LAST_WORDS_S)

    def _send(self, data: bytes) -> None:
        self._outgoing.put(data)
        _poke(self._wake_thread_fd)

    def _run(self) -> None:
        context = new_context()
        socket = connect_dealer(context, self._endpoint, self._identity)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_link_fd, zmq.POLLIN)
        while not self._closing:
            socket.send(Heartbeat(self._process, self.state, self.progress).to_wire())
            if not poller.poll(HEARTBEAT_INTERVAL_MS):
                self._watch_main_loop(socket)
            _drain(self._wake_link_fd)
            self._exchange(socket)
        self._exchange(socket)
        socket.close(linger=int(LAST_WORDS_S * 1000))
        context.term()

    def _watch_main_loop(self, socket: "zmq.Socket[bytes]") -> None:
        """One more heartbeat without a turn; counted, not timed: the whole process may have been paused."""
        self._beats_without_turn = self._beats_without_turn + 1 if self.state == "serving" else 0
        if self._beats_without_turn % TURN_INTERVAL_BEATS == TURN_INTERVAL_BEATS - 1:
            self.wake()
        if self._beats_without_turn * HEARTBEAT_INTERVAL_MS >= self._hang_timeout_s * 1000:
            faulthandler.dump_traceback()
            text = f"its main loop has not turned for {self._hang_timeout_s:g} s; its stack is on stderr"
            socket.send(Failed(self._process, text).to_wire())
            socket.close(linger=int(LAST_WORDS_S * 1000))
            socket.context.term()
            os._exit(1)

    def _exchange(self, socket: "zmq.Socket[bytes]") -> None:
        while not self._outgoing.empty():
            socket.send(self._outgoing.get())
        while socket.poll(0):
            try:
                self.order(decode_for_child(socket.recv()))
            except WireError as error:
                logger.error("dropped a message from the supervisor: %s", error)


def _wake_pipe() -> tuple[int, int]:
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    return read_fd, write_fd


def _poke(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):  # a full pipe wakes the reader just as well
        os.write(fd, b"x")


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def run_child(room: str, main: Callable[[EngineConfig, SupervisorLink, int], int]) -> None:
    """Run a room's `main(config, link, rank)` as a child process and exit with its code.

    Args:
        room: `frontend`, `scheduler` or `worker`; a worker's name gets its rank.
        main: returns the exit code.
    """
    arguments = _parse(room)
    process = f"worker-{arguments.rank}" if room == "worker" else room
    setproctitle.setproctitle(f"trireme-{process}")
    watch_supervisor()
    config = EngineConfig.from_json(Path(arguments.config).read_text())
    log.set_up(process, config.log.log_level, config.log.log_format)
    link = SupervisorLink(process, config.endpoint("supervisor", 0), HANG_TIMEOUTS_S[room], config.session)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: link.order(Stop(int(config.server.shutdown_timeout * 1000))))
    try:
        code = main(config, link, arguments.rank)
    except BaseException as error:
        _end_by(error, link)
    link.close()
    sys.stderr.flush()
    sys.exit(code)


def _parse(room: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {room}")
    parser.add_argument("--config", required=True, help="JSON file with the whole configuration")
    parser.add_argument("--rank", type=int, default=0, help="which worker this is")
    return parser.parse_args()


def _end_by(error: BaseException, link: SupervisorLink) -> NoReturn:
    """Log the error, tell the supervisor, and end at once.

    Nothing is taken down in order, and what the error's frames hold stays alive until the end: the interpreter would
    wait for threads that wait for something themselves, and freeing what lies on a broken device may never return.
    """
    text = str(error) if isinstance(error, TriremeError) else first_line(error)
    if not isinstance(error, ConfigError | StartupError):  # the supervisor prints those
        logger.error("stopped by an error", exc_info=error)
    link.failed(text)
    link.close()
    sys.stderr.flush()
    os._exit(exit_code(error))


def watch_supervisor() -> None:
    """End this process as soon as its supervisor is gone, at whatever stage either of them is.

    Two ways, since each has a gap: the kernel's parent-death signal (Linux; tied to the thread that started us), and a
    thread that waits for the end of a pipe whose other end only the supervisor holds.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    number = os.environ.pop(DEATH_PIPE_VARIABLE, "")
    if number:
        threading.Thread(target=_wait_for_end, args=(int(number),), name="death-watch", daemon=True).start()


def _wait_for_end(fd: int) -> None:
    while os.read(fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)

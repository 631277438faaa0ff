"""Starts the processes of one engine, watches them and stops them.

Order of start: HTTP socket (bound here, so that a port in use is noticed at once), control socket, model folder, then
frontend, scheduler and worker side by side. `Supervisor._turn` handles everything that happens: messages on the control
socket, ended children, missing heartbeats, signals. Order of stop: the frontend, which ends its requests first, then
the others. If a child ends or stops responding, the run ends: the frontend is told, so that requests in flight get
their error, and one line on stderr names the process and its error.

With `--restart` the child is started again instead, in a new *session* with sockets of its own, which nothing of an
earlier session can reach:

    lost                   started again            the others are told (NewSession)
    scheduler or worker    scheduler and workers    the frontend: its requests wait, then go on
    frontend               frontend                 the scheduler: it drops the old frontend's requests
    anything, while another process is not ready    those and that one

One loss more than `--restart-limit` allows ends the run as above, as does any loss before the engine was ready.

Knows nothing of models or requests; never loads torch. Called by `launcher.serve`.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import zmq

from common import log
from common.child import READING_VOCABULARY
from common.config import DEFAULT_MODEL, EngineConfig, in_session, with_changes
from common.errors import EXIT_CODES, ConfigError, EngineDeadError, StartupError, WireError
from common.http_socket import HTTP_SOCKET_VARIABLE, bind_http, file_identity, http_url, remove_own
from common.messages import Failed, Heartbeat, NewSession, PeerFailed, Profile, Ready, Stop, decode_for_supervisor
from common.processes import Child, DeathPipe, Wakeup, reap_orphans, seconds_since_start
from common.profiling import TRACING, TRACING_TIMEOUT_S
from common.run_dir import RunDir
from common.sockets import bind_router, new_context
from launcher.model_folders import check_model_folder, folder_at_hand, objections
from launcher.restarts import WINDOW_S, Restarts

HEARTBEAT_TIMEOUT_S = 2.0
SILENCE_LIMITS_S = {TRACING: TRACING_TIMEOUT_S, READING_VOCABULARY: 30.0}
LOADING_SILENCE_S = 120.0
"""For a process that is not ready: reading libraries from a slow disk can hold the interpreter for long."""
FAILURE_NOTICE_S = 1.5
"""How long the frontend gets to tell its clients, and whoever asks for its health, that another process is lost, or
its clients that nobody waits for them any more."""
EXIT_TIMEOUT_S = 5.0
"""How long a process gets to exit after its grace."""
FAILED_EXIT_S = 0.5
"""How long one that has said why it ends gets to exit; a driver may take seconds to give a GPU's memory back."""
LAST_WORDS_TIMEOUT_S = 2.0
TURN_LIMIT_MS = 250
CONFIG_FILE = "config.json"
POLL_WITHOUT_PIDFD_MS = 50

logger = logging.getLogger("supervisor")


class StopRequested(Exception):
    """The run is to end; requests in flight have `grace_s` seconds to finish."""

    def __init__(self, why: str, grace_s: float) -> None:
        super().__init__(why)
        self.grace_s = grace_s


class AlreadyReported(ConfigError):
    """A child has already reported its error on stderr; there is nothing to add."""


class ProcessLost(EngineDeadError):
    """A child ended or hangs, although it was not told to stop."""

    def __init__(self, process: str, message: str, exit_code: int | None) -> None:
        super().__init__(message)
        self.process = process
        self.exit_code = exit_code


@dataclass
class Peer:
    """A child, with its state as its side of the control link reports it."""

    child: Child
    identity: str
    started_at: float
    last_heard_at: float
    ready_after_s: float | None = None
    last_words: str = ""
    last_words_at_s: float = 0.0
    state: str = ""

    def is_leaving(self, now_s: float) -> bool:
        """Whether it has failed while it served, and takes long to exit. The frontend has clients to tell before."""
        limit_s = EXIT_TIMEOUT_S if self.child.name == "frontend" else FAILED_EXIT_S
        return bool(self.last_words and self.ready_after_s is not None and now_s > self.last_words_at_s + limit_s)


class Supervisor:
    """Starts the processes of one engine, watches them and stops them.

    Args:
        config: complete but for `model_dir` and `tokenizer_dir`.
        run_dir: this engine's.
        wakeup: where signals arrive.
        parent_fd: a pipe that is closed when the process that started this engine is gone; -1 for none.
        rooms: name and Python arguments of each child; None takes the engine's own.
    """

    def __init__(
        self,
        config: EngineConfig,
        run_dir: RunDir,
        wakeup: Wakeup,
        parent_fd: int = -1,
        rooms: dict[str, list[str]] | None = None,
    ) -> None:
        self.config = config
        self._run_dir = run_dir
        self._wakeup = wakeup
        self._parent_fd = parent_fd
        self._rooms = engine_rooms(config) if rooms is None else rooms
        self._signals_seen = 0
        self._turned_at = time.monotonic()
        self._turn_limit_ms = TURN_LIMIT_MS
        self._exit_fds: set[int] = set()
        self._peers: dict[str, Peer] = {}
        self._timeline: list[str] = []
        self._was_ready = False
        self._restarts = Restarts(config.server.restart_limit if config.server.restart else 0)
        self._restart_deadline_s = 0.0
        self._death_pipe = DeathPipe()
        self._http_socket = bound_http(config) if config.server.http else None
        self._uds_identity = file_identity(config.server.uds)
        self.http = http_url(config.server, self._http_socket) if self._http_socket else ""
        self._context = new_context()
        self._router = bind_router(self._context, config.endpoint("supervisor"))
        self._poller = zmq.Poller()
        for waited_for in (self._router, wakeup.fd, *([parent_fd] if parent_fd >= 0 else [])):
            self._poller.register(waited_for, zmq.POLLIN)

    def start(self) -> None:
        """Start all processes; returns when every one of them is ready.

        Raises:
            ConfigError, StartupError: the model cannot be loaded, or the processes were not ready in time.
            ProcessLost: one of them ended.
            StopRequested: a signal came.
        """
        self._mark("launch", seconds_since_start())
        began = time.monotonic()
        model_dir, tokenizer_dir = self._folders()
        self._mark("model folder", time.monotonic() - began)
        self.config = with_changes(self.config, model_dir=model_dir, tokenizer_dir=tokenizer_dir)
        self._write_config()
        self._spawn(self._rooms)
        deadline = time.monotonic() + self.config.server.startup_timeout
        while self._unready():
            if time.monotonic() > deadline:
                raise StartupError(self._not_in_time())
            self._turn()
        self._was_ready = True
        logger.info("start-up time: %s", ", ".join(self._timeline))

    def run_until(self, done: Callable[[], bool]) -> None:
        """Watch the processes until `done()`; raises ProcessLost or StopRequested."""
        while not done():
            self._turn()

    def stop(self, grace_s: float) -> None:
        """Stop the processes in order, the frontend first; a second signal leaves it time for its clients' errors only,
        and a third none.

        An engine that has not come up has nothing to finish: `close` ends it. What is just being started again may come
        up within the grace and finish its requests.

        Raises:
            ProcessLost: a process was lost while the frontend waited for requests; they have had their error, or their
                connections ended with the frontend.
        """
        if not self._was_ready or "frontend" in self._unready():
            return
        others = [name for name in self._peers if name != "frontend"]
        for names, seconds in ((["frontend"], grace_s), (others, 0.0)):
            began = time.monotonic()
            self._order(names, Stop(int(seconds * 1000)))
            ready = [name for name in names if name not in self._unready()]
            if not self._wait_ended(ready, seconds + EXIT_TIMEOUT_S, watch_others=names != others):
                self._order(["frontend"], Stop(0))
                self._wait_ended(["frontend"], FAILURE_NOTICE_S)
                return
            logger.debug("%s ended after %.2f s", " and ".join(names), time.monotonic() - began)

    def announce_loss(self, lost: ProcessLost) -> None:
        """Tell the others, and give the frontend a moment to tell its clients: before it serves it has none."""
        frontend = self._peers.get("frontend")
        if frontend is None or frontend.ready_after_s is None or lost.process == "frontend":
            return
        self._order([name for name in self._peers if name != lost.process], PeerFailed(lost.process, str(lost)))
        self._wait_ended(["frontend"], FAILURE_NOTICE_S)

    def close(self) -> None:
        """End at once whatever is still running, and release all resources."""
        for peer in self._peers.values():
            peer.child.kill()
        for peer in self._peers.values():
            peer.child.close()
        self._router.close(linger=0)
        self._context.term()
        self._death_pipe.close()
        if self._http_socket:
            self._http_socket.close()
        remove_own(self.config.server.uds, self._uds_identity)

    def _write_config(self) -> None:
        """Leave the configuration of the session that has begun for its processes."""
        config = with_changes(self.config, session=self._restarts.count)
        self._run_dir.write(CONFIG_FILE, config.to_json())

    def _spawn(self, names: Iterable[str]) -> None:
        """Start processes, in the session that has begun, with the configuration that `_write_config` has left."""
        session = self._restarts.count
        config_path = self._run_dir.path / CONFIG_FILE
        for name in names:
            inherits = name == "frontend" and self._http_socket is not None
            fds = [self._http_socket.fileno()] if inherits and self._http_socket else []
            variables = {HTTP_SOCKET_VARIABLE: str(fds[0])} if fds else {}
            arguments = [*self._rooms[name], "--config", str(config_path)]
            child = Child(name, arguments, self._death_pipe, variables=variables, inherited_fds=fds)
            now = time.monotonic()
            self._peers[name] = Peer(child, in_session(name, session), now, now)
            self._watch_end(child)

    def _unready(self) -> list[str]:
        return [name for name, peer in self._peers.items() if peer.ready_after_s is None]

    def _not_in_time(self) -> str:
        return (
            f"{' and '.join(self._unready())} not ready within --startup-timeout, which is "
            f"{self.config.server.startup_timeout:g} s"
        )

    def _watch_end(self, child: Child) -> None:
        if child.exit_fd < 0:
            self._turn_limit_ms = POLL_WITHOUT_PIDFD_MS
        else:
            self._exit_fds.add(child.exit_fd)
            self._poller.register(child.exit_fd, zmq.POLLIN)

    def _forget_end(self, exit_fd: int) -> None:
        if exit_fd in self._exit_fds:
            self._exit_fds.remove(exit_fd)
            self._poller.unregister(exit_fd)

    def _folders(self) -> tuple[str, str]:
        """The local folders of model and tokenizer."""
        options = self.config.model
        revision = ("--revision", options.revision) if options.revision else ()
        model_dir = self._local_folder("--model", options.model, *revision)
        check_model_folder(options.model, model_dir)
        if not options.tokenizer:
            return model_dir, model_dir
        return model_dir, self._local_folder("--tokenizer", options.tokenizer, "--tokenizer-only")

    def _local_folder(self, option: str, name: str, *arguments: str) -> str:
        """The local folder that an option names, fetched and converted first if need be."""
        if folder := folder_at_hand(option, name):
            return folder
        logger.info("fetching %s", "the default model" if name == DEFAULT_MODEL else name)
        command = ["-m", "worker_proc.fetch_model", "--model", name, *arguments]
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"} if log.is_json() else {}
        child = Child("fetch_model", command, self._death_pipe, variables=quiet, capture_stdout=True)
        self._watch_end(child)
        try:
            self.run_until(child.ended)
            if child.exit_code == EXIT_CODES[ConfigError]:
                raise AlreadyReported
            if child.exit_code != 0:
                raise StartupError(child.describe_end())
            return child.read_stdout().strip().splitlines()[-1]
        finally:
            child.kill()
            self._forget_end(child.exit_fd)
            child.close()

    def _turn(self) -> None:
        """Wait until something happens, for a quarter of a second at most, and handle everything that has."""
        self._wait()
        self._take_messages()
        self._check_orders()
        self._check_losses()
        if self._restarts.count and os.getpid() == 1:
            reap_orphans([peer.child.pid for peer in self._peers.values()])

    def _wait(self) -> None:
        ready = dict(self._poller.poll(self._turn_limit_ms))
        self._wakeup.clear()
        for exit_fd in self._exit_fds & ready.keys():  # it has woken us; it would do so for ever
            self._forget_end(exit_fd)
        if self._parent_fd in ready:
            self._poller.unregister(self._parent_fd)
            raise StopRequested("the process that started this engine is gone", 0.0)

    def _take_messages(self) -> None:
        while self._router.poll(0):
            identity, data = self._router.recv_multipart()[:2]
            peer = next((p for p in self._peers.values() if p.identity == identity.decode(errors="replace")), None)
            try:
                message = decode_for_supervisor(data)
            except WireError as error:
                logger.error("dropped a message on the control socket: %s", error)
                continue
            if peer is None:
                continue  # the last words of one that was started again
            peer.last_heard_at = time.monotonic()
            if isinstance(message, Ready):
                self._on_ready(peer, message)
            elif isinstance(message, Failed):
                peer.last_words, peer.last_words_at_s = message.message, peer.last_heard_at
            elif isinstance(message, Heartbeat):
                peer.state = message.state
            elif isinstance(message, Profile):
                self._order([name for name in self._peers if name.startswith(message.process)], message)

    def _on_ready(self, peer: Peer, message: Ready) -> None:
        peer.ready_after_s = time.monotonic() - peer.started_at
        self._mark(peer.child.name, peer.ready_after_s)
        logger.info("%s ready after %.1f s: %s", peer.child.name, peer.ready_after_s, message.detail)
        if self._was_ready and not self._unready():
            logger.info("serving again (restarts so far: %d)", self._restarts.count)

    def _check_orders(self) -> None:
        new = len(self._wakeup.signals) - self._signals_seen
        self._signals_seen = len(self._wakeup.signals)
        if new:
            grace_s = 0.0 if new > 1 else self.config.server.shutdown_timeout
            raise StopRequested(signal.Signals(self._wakeup.signals[-1]).name, grace_s)

    def _check_losses(self, leaving: Sequence[str] = ()) -> None:
        """Restart what is lost, or raise ProcessLost. Processes that are `leaving` may end."""
        try:
            self._check_ended(leaving)
            self._check_heartbeats(leaving)
            self._check_restart()
        except ProcessLost as lost:
            if leaving and lost.exit_code == 0:  # told to stop, as we are
                raise
            self._restart(lost)

    def _check_ended(self, leaving: Sequence[str]) -> None:
        now = time.monotonic()
        for name, peer in self._peers.items():
            if name not in leaving and (peer.child.ended() or peer.is_leaving(now)):
                self._await_last_words(peer)
                raise ProcessLost(name, peer.child.describe_end(peer.last_words), peer.child.exit_code)

    def _await_last_words(self, peer: Peer) -> None:
        """Wait for the last message of a failed child, which may still be on its way through zmq."""
        deadline = time.monotonic() + LAST_WORDS_TIMEOUT_S
        while peer.child.exit_code in (1, 2, 3) and not peer.last_words and time.monotonic() < deadline:
            self._router.poll(50)
            self._take_messages()

    def _check_heartbeats(self, leaving: Sequence[str]) -> None:
        now = time.monotonic()
        paused_ourselves = now - self._turned_at > 1.0
        self._turned_at = now
        for name, peer in self._peers.items():
            if paused_ourselves or not peer.state or name in leaving:  # the first heartbeat has --startup-timeout
                peer.last_heard_at = now
            silence_s = now - peer.last_heard_at
            limit_s = SILENCE_LIMITS_S.get(peer.state, HEARTBEAT_TIMEOUT_S)
            if silence_s > (limit_s if peer.ready_after_s is not None else LOADING_SILENCE_S):
                raise ProcessLost(name, f"{name} does not respond: no heartbeat for {silence_s:.1f} s", None)

    # -- restarts ------------------------------------------------------------------------------------------------------

    def _check_restart(self) -> None:
        """Check the deadline of processes that are being restarted."""
        if self._was_ready and self._unready() and time.monotonic() > self._restart_deadline_s:
            raise ProcessLost(self._unready()[0], self._not_in_time(), None)

    def _restart(self, lost: ProcessLost) -> None:
        """Restart the lost process, and those that cannot go on without what it knew; or raise its loss."""
        if not self._was_ready or not self.config.server.restart:
            raise lost
        if not self._restarts.take():
            limit = f"--restart-limit is {self._restarts.limit} within {WINDOW_S / 60:g} minutes"
            raise ProcessLost(lost.process, f"{lost}; it is not started again: {limit}", lost.exit_code)
        names = self._to_restart(lost.process)
        logger.error("%s; starting again: %s (restart %d)", lost, ", ".join(names), self._restarts.count)
        try:
            self._write_config()  # before anybody hears of the session: it may not come about
            self._begin_session(names, lost)
        except StartupError as error:
            raise ProcessLost(lost.process, f"{lost}; {error}", lost.exit_code) from None

    def _begin_session(self, names: Sequence[str], lost: ProcessLost) -> None:
        """Tell those that go on, and start the named processes anew."""
        self._remove_sockets(names)
        order = NewSession(lost.process, f"{lost}; it is being started again", self._restarts.count)
        self._order([name for name in ("frontend", "scheduler") if name not in names], order)
        for name in names:  # which may take a driver seconds
            self._remove(name)
        self._restart_deadline_s = time.monotonic() + self.config.server.startup_timeout
        self._spawn(names)

    def _to_restart(self, lost: str) -> list[str]:
        """All processes that restart together, with those that are not ready: no order could reach them."""
        unready = {lost, *self._unready()}
        back = any(name != "frontend" for name in unready)
        return [name for name in self._rooms if (name in unready if name == "frontend" else back)]

    def _remove(self, name: str) -> None:
        child = self._peers.pop(name).child
        self._forget_end(child.exit_fd)
        child.kill()
        child.close()

    def _remove_sockets(self, names: Sequence[str]) -> None:
        """Remove the socket files of earlier sessions: closing a socket leaves its file behind."""
        links = ["requests", "outputs"]
        if names != ["frontend"]:
            links += ["plans", "results"]
        for link in links:
            for file in self._run_dir.path.glob(f"{link}*.sock"):
                file.unlink(missing_ok=True)

    def _order(self, names: Sequence[str], order: Stop | PeerFailed | Profile | NewSession) -> None:
        for name in names:
            peer = self._peers.get(name)
            if peer is not None and not peer.child.ended():
                self._router.send_multipart([peer.identity.encode(), order.to_wire()])

    def _wait_ended(self, names: Sequence[str], timeout_s: float, *, watch_others: bool = False) -> bool:
        """Wait until the named processes have ended; False if a further signal came instead.

        Args:
            watch_others: the named ones need the others until then: whoever is lost is started again, or announced.
        """
        deadline = time.monotonic() + timeout_s
        while waited_for := [name for name in names if name in self._peers and not self._peers[name].child.ended()]:
            if time.monotonic() > deadline:
                logger.warning("%s did not stop in %.1f s", " and ".join(waited_for), timeout_s)
                return True
            try:
                self._wait()
                self._take_messages()
                self._check_orders()
                if watch_others:
                    self._check_losses(leaving=names)
            except ProcessLost as lost:
                self.announce_loss(lost)
                if lost.exit_code == 0:  # told to stop, as we are
                    return True
                raise
            except StopRequested as again:
                logger.warning("%s: stopping at once", again)
                return False
        if watch_others:
            self._check_ended_well(names)
        return True

    def _check_ended_well(self, names: Sequence[str]) -> None:
        """Raise the loss of one that was to finish its requests and has failed, or was killed, over it."""
        for name in names:
            peer = self._peers.get(name)
            if peer is not None and peer.child.exit_code:
                self._await_last_words(peer)
                raise ProcessLost(name, peer.child.describe_end(peer.last_words), peer.child.exit_code)

    def _mark(self, what: str, seconds: float) -> None:
        self._timeline.append(f"{what} {seconds:.1f} s")


def engine_rooms(config: EngineConfig) -> dict[str, list[str]]:
    """Name and Python arguments of each process; the slowest to start comes first."""
    ranks = range(config.worker.tensor_parallel_size)
    workers = {f"worker-{rank}": ["-m", "worker_proc", "--rank", str(rank)] for rank in ranks}
    return workers | {"frontend": ["-m", "frontend"], "scheduler": ["-m", "scheduler_proc"]}


def bound_http(config: EngineConfig) -> socket.socket:
    """The socket that HTTP is served on; raises ConfigError, which names what is wrong with the model too.

    Otherwise whoever frees the address, or chooses another one, would be told only then.
    """
    try:
        return bind_http(config.server)
    except ConfigError as error:
        raise ConfigError("; and ".join([*objections(config.model), str(error)])) from None

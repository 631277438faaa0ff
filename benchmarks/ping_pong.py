"""The least time that one message between two processes takes: half a round trip of a bare ping-pong.

Over ZeroMQ's sockets as the engine has them: PUSH and PULL between its processes, DEALER and ROUTER towards clients.
Each end waits in one of three ways: it blocks in a poll before it receives (`blocking`); it asks again and again,
yielding its core to whoever wants it (`spinning`); or it does that and keeps ZeroMQ's own thread awake as well
(`awake`). The engine does as `--busy-poll-ms` and `--busy-poll-io` say. For comparison the kind `unix`: the same over a
bare Unix socket, where no other thread is between the two. Called by benchmarks/hops.py.
"""

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import zmq

from common.busy_poll import Errands
from common.sockets import bind_client_router, bind_pull, connect_client, connect_push, new_context

WARM_UP = 20
LIMIT_S = 20
MESSAGE_LIMIT = 1 << 16

Way = Literal["blocking", "spinning", "awake"]


class Ends(Protocol):
    """What one process sends with and receives with."""

    def send(self, frames: list[bytes]) -> None:
        """Send one message."""

    def receive(self, *, spins: bool) -> list[bytes]:
        """Wait for one message."""

    def idle(self) -> None:
        """One turn of waiting."""

    def close(self) -> None:
        """Close the sockets."""


class ZmqEnds:
    """A pair of sockets of one process: one to send with, one to receive from.

    Args:
        folder: where the socket files are.
        kind: `internal` or `client`.
        first: whether this end begins.
        awake: keep ZeroMQ's thread awake while waiting.
    """

    def __init__(self, folder: Path, kind: str, *, first: bool, awake: bool) -> None:
        self._monitor: zmq.Socket[bytes] | None = None
        if kind == "internal":
            names = ("there", "back") if first else ("back", "there")
            self._context = new_context()
            self._push = connect_push(self._context, f"ipc://{folder}/{names[0]}.sock")
            self._pull = bind_pull(self._context, f"ipc://{folder}/{names[1]}.sock")
        elif first:
            self._context, self._pull, self._monitor = connect_client(f"ipc://{folder}/client.sock")
            self._push = self._pull
        else:
            self._context = new_context()
            self._push = self._pull = bind_client_router(self._context, f"ipc://{folder}/client.sock")
        self._errands = Errands(self._context) if awake else None
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)

    def send(self, frames: list[bytes]) -> None:
        """Send one message."""
        self._push.send_multipart(frames, zmq.NOBLOCK)

    def receive(self, *, spins: bool) -> list[bytes]:
        """Wait for one message."""
        if not spins:
            if not self._poller.poll(LIMIT_S * 1000):
                raise TimeoutError("the other end of the ping-pong is silent")
            return self._pull.recv_multipart(zmq.NOBLOCK)
        while True:
            try:
                return self._pull.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self.idle()

    def idle(self) -> None:
        """One turn of waiting."""
        if self._errands is not None:
            self._errands.send()
        os.sched_yield()

    def close(self) -> None:
        """Close all sockets."""
        if self._errands is not None:
            self._errands.close()
        if self._monitor is not None:
            self._push.disable_monitor()
            self._monitor.close(linger=0)
        for each in (self._push, self._pull):
            each.close(linger=0)
        self._context.term()


class UnixEnds:
    """A Unix socket that keeps messages apart.

    Args:
        folder: where the socket file is.
        first: whether this end begins; it is there before the other.
    """

    def __init__(self, folder: Path, *, first: bool) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listens = first
        if first:
            self._socket.bind(f"{folder}/unix.sock")
            self._socket.listen()
        else:
            self._socket.connect(f"{folder}/unix.sock")

    def send(self, frames: list[bytes]) -> None:
        """Send one message."""
        if self._listens:
            listener, self._listens = self._socket, False
            self._socket, _ = listener.accept()
            listener.close()
        self._socket.send(frames[0])

    def receive(self, *, spins: bool) -> list[bytes]:
        """Wait for one message."""
        self._socket.setblocking(not spins)
        while True:
            try:
                return [self._socket.recv(MESSAGE_LIMIT)]
            except BlockingIOError:
                self.idle()

    def idle(self) -> None:
        """One turn of waiting."""
        os.sched_yield()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def ends_of(folder: Path, kind: str, way: Way, *, first: bool) -> Ends:
    """One end of a ping-pong."""
    return UnixEnds(folder, first=first) if kind == "unix" else ZmqEnds(folder, kind, first=first, awake=way == "awake")


def hops_us(folder: Path, kind: str, sizes: Sequence[int], count: int, *, way: Way, rest_s: float = 0.0) -> list[float]:
    """Half the median round trip of messages of so many bytes each, in microseconds.

    Args:
        folder: for the socket files; made if need be.
        kind: `internal`, `client` or `unix`.
        sizes: in bytes.
        count: round trips of each size.
        way: how both ends wait.
        rest_s: how long neither end sends anything before each round trip, so that processors go to sleep.
    """
    folder.mkdir(exist_ok=True)
    ends = ends_of(folder, kind, way, first=True)
    other = multiprocessing.get_context("spawn").Process(target=_echo, args=(folder, kind, way), daemon=True)
    other.start()
    try:
        ends.send([b"x"])
        ends.receive(spins=False)  # the other process has started
        return [_median_ns(ends, bytes(size), count, way, rest_s) / 2e3 for size in sizes]
    finally:
        other.kill()
        other.join()
        ends.close()


def _median_ns(ends: Ends, message: bytes, count: int, way: Way, rest_s: float) -> float:
    times_ns = []
    for _ in range(count + WARM_UP):
        _rest(ends, way, rest_s)
        start_ns = time.monotonic_ns()
        ends.send([message])
        ends.receive(spins=way != "blocking")
        times_ns.append(time.monotonic_ns() - start_ns)
    return statistics.median(times_ns[WARM_UP:])


def _rest(ends: Ends, way: Way, rest_s: float) -> None:
    """A pause, in which a loop that is kept awake goes on turning."""
    if way != "awake":
        time.sleep(rest_s)
        return
    end_s = time.monotonic() + rest_s
    while time.monotonic() < end_s:
        ends.idle()


def _echo(folder: Path, kind: str, way: Way) -> None:
    ends = ends_of(folder, kind, way, first=False)
    while True:
        ends.send(ends.receive(spins=way != "blocking"))

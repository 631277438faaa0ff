"""The least time that one message between two processes takes: half a round trip of a bare pyzmq ping-pong over ipc.

The sockets are those of the engine: PUSH and PULL between its processes, DEALER and ROUTER towards clients. Each end
blocks in a poll before it receives, or asks again and again, yielding its core to whoever wants it, or does so and also
keeps ZeroMQ's I/O thread on its core (`common.busy_poll`), as the engine does with `--busy-poll-ms`. Called by
benchmarks/hops.py.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import zmq

from common.busy_poll import IoThreads
from common.sockets import bind_client_router, bind_pull, connect_client, connect_push, new_context

WARM_UP = 20
LIMIT_S = 20

Mode = Literal["blocking", "spinning", "kept"]


class Ends:
    """A pair of sockets of one process: one to send with, one to receive from.

    Args:
        folder: where the socket files are.
        kind: `internal` or `client`.
        first: whether this end begins.
        mode: how it waits.
    """

    def __init__(self, folder: Path, kind: str, first: bool, mode: Mode) -> None:
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
        self._mode = mode
        self._threads = IoThreads(self._context)
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)

    def send(self, frames: list[bytes]) -> None:
        """Send one message."""
        self._push.send_multipart(frames, zmq.NOBLOCK)

    def receive(self) -> list[bytes]:
        """Wait for one message."""
        if self._mode == "blocking":
            if not self._poller.poll(LIMIT_S * 1000):
                raise TimeoutError("the other end of the ping-pong is silent")
            return self._pull.recv_multipart(zmq.NOBLOCK)
        while True:
            try:
                return self._pull.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._turn()

    def rest(self, rest_s: float) -> None:
        """Send nothing for so long: asleep, unless this end keeps its core."""
        if self._mode != "kept":
            return time.sleep(rest_s)
        end_s = time.monotonic() + rest_s
        while time.monotonic() < end_s:
            self._turn()

    def _turn(self) -> None:
        if self._mode == "kept":
            self._threads.follow()
        os.sched_yield()

    def close(self) -> None:
        """Close both sockets."""
        if self._monitor is not None:
            self._push.disable_monitor()
            self._monitor.close(linger=0)
        for socket in (self._push, self._pull):
            socket.close(linger=0)
        self._context.term()


def hops_us(
    folder: Path, kind: str, sizes: Sequence[int], count: int, *, mode: Mode, rest_s: float = 0.0
) -> list[float]:
    """Half the median round trip of messages of so many bytes each, in microseconds.

    Args:
        folder: for the socket files; made if need be.
        kind: `internal` or `client`.
        sizes: in bytes.
        count: round trips of each size.
        mode: how both ends wait.
        rest_s: how long neither end sends anything before each round trip, so that processors go to sleep.
    """
    folder.mkdir(exist_ok=True)
    other = multiprocessing.get_context("spawn").Process(target=_echo, args=(folder, kind, mode), daemon=True)
    other.start()
    ends = Ends(folder, kind, True, mode)
    try:
        ends.send([b""])
        ends.receive()  # the other process has started
        return [_median_ns(ends, bytes(size), count, rest_s) / 2e3 for size in sizes]
    finally:
        ends.close()
        other.kill()
        other.join()


def _median_ns(ends: Ends, message: bytes, count: int, rest_s: float) -> float:
    times_ns = []
    for _ in range(count + WARM_UP):
        if rest_s:
            ends.rest(rest_s)
        start_ns = time.monotonic_ns()
        ends.send([message])
        ends.receive()
        times_ns.append(time.monotonic_ns() - start_ns)
    return statistics.median(times_ns[WARM_UP:])


def _echo(folder: Path, kind: str, mode: Mode) -> None:
    ends = Ends(folder, kind, False, mode)
    while True:
        ends.send(ends.receive())

"""The least time that one message between two processes takes: half a round trip of a bare pyzmq ping-pong over ipc.

The sockets are those of the engine: PUSH and PULL between its processes, DEALER and ROUTER towards clients. Each end
either blocks in a poll before it receives or asks again and again, yielding its core to whoever wants it; the engine
does one or the other, as `--busy-poll-ms` says. Called by benchmarks/hops.py.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from common.sockets import bind_client_router, bind_pull, connect_client, connect_push, new_context

WARM_UP = 20
LIMIT_S = 20


class Ends:
    """A pair of sockets of one process: one to send with, one to receive from.

    Args:
        folder: where the socket files are.
        kind: `internal` or `client`.
        first: whether this end begins.
    """

    def __init__(self, folder: Path, kind: str, first: bool) -> None:
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
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)

    def send(self, frames: list[bytes]) -> None:
        """Send one message."""
        self._push.send_multipart(frames, zmq.NOBLOCK)

    def receive(self, spins: bool) -> list[bytes]:
        """Wait for one message."""
        if not spins:
            if not self._poller.poll(LIMIT_S * 1000):
                raise TimeoutError("the other end of the ping-pong is silent")
            return self._pull.recv_multipart(zmq.NOBLOCK)
        while True:
            try:
                return self._pull.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
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
    folder: Path, kind: str, sizes: Sequence[int], count: int, *, spins: bool, rest_s: float = 0.0
) -> list[float]:
    """Half the median round trip of messages of so many bytes each, in microseconds.

    Args:
        folder: for the socket files; made if need be.
        kind: `internal` or `client`.
        sizes: in bytes.
        count: round trips of each size.
        spins: both ends ask again and again instead of waiting in a poll.
        rest_s: how long neither end sends anything before each round trip, so that processors go to sleep.
    """
    folder.mkdir(exist_ok=True)
    other = multiprocessing.get_context("spawn").Process(target=_echo, args=(folder, kind, spins), daemon=True)
    other.start()
    ends = Ends(folder, kind, first=True)
    try:
        ends.send([b""])
        ends.receive(spins=False)  # the other process has started
        return [_median_ns(ends, bytes(size), count, spins, rest_s) / 2e3 for size in sizes]
    finally:
        ends.close()
        other.kill()
        other.join()


def _median_ns(ends: Ends, message: bytes, count: int, spins: bool, rest_s: float) -> float:
    times_ns = []
    for _ in range(count + WARM_UP):
        if rest_s:
            time.sleep(rest_s)
        start_ns = time.monotonic_ns()
        ends.send([message])
        ends.receive(spins)
        times_ns.append(time.monotonic_ns() - start_ns)
    return statistics.median(times_ns[WARM_UP:])


def _echo(folder: Path, kind: str, spins: bool) -> None:
    ends = Ends(folder, kind, first=False)
    while True:
        ends.send(ends.receive(spins))

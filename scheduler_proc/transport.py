"""The scheduler's sockets: what comes in decoded, what goes out encoded.

    requests   PULL, bound here        from the frontend: add, abort, flush
    results    PULL, bound here        from the workers: ready, step results
    outputs    PUSH, the frontend binds
    plans-N    PUSH, worker N binds

Bytes that are not a message of their socket cost that message; the first of each socket is logged in full. Called by
the process main alone.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import zmq

from common.config import EngineConfig
from common.errors import WireError
from common.messages import StepResult, WorkerReady, decode_for_scheduler, decode_from_worker
from common.sockets import bind_pull, connect_push, new_context
from scheduler_proc.core import ForScheduler

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Message(Protocol):
    """Anything that can be sent."""

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""


class Transport:
    """The sockets of one scheduler process.

    Args:
        config: names the endpoints.
        wake_fd: polled beside the sockets, so that orders from the supervisor end a wait.
    """

    def __init__(self, config: EngineConfig, wake_fd: int) -> None:
        self._context = new_context()
        self._requests = bind_pull(self._context, config.endpoint("requests"))
        self._results = bind_pull(self._context, config.endpoint("results"))
        self._outputs = connect_push(self._context, config.endpoint("outputs"))
        self._plans = [
            connect_push(self._context, config.endpoint(f"plans-{rank}"))
            for rank in range(config.worker.tensor_parallel_size)
        ]
        self._wake_fd = wake_fd
        self._poller = zmq.Poller()
        for readable in (self._requests, self._results, wake_fd):
            self._poller.register(readable, zmq.POLLIN)
        self._dropped: dict[str, int] = {}

    def wait(self, timeout_ms: int | None) -> bool:
        """Until something can be read, or the timeout; None waits for ever. True if there is an order to take."""
        return any(source == self._wake_fd for source, _ in self._poller.poll(timeout_ms))

    def requests(self, limit: int) -> Iterator[ForScheduler]:
        """At most `limit` messages that have come from the frontend."""
        return self._drain(self._requests, decode_for_scheduler, "requests", limit)

    def results(self, limit: int = 64) -> Iterator[StepResult | WorkerReady]:
        """At most `limit` messages that have come from the workers."""
        return self._drain(self._results, decode_from_worker, "results", limit)

    def send_out(self, message: Message) -> None:
        """To the frontend."""
        self._outputs.send(message.to_wire())

    def send_plan(self, message: Message) -> None:
        """To every worker."""
        data = message.to_wire()
        for socket in self._plans:
            socket.send(data)

    def close(self) -> None:
        """Send what is queued for the frontend, drop the rest."""
        for socket in (self._requests, self._results, *self._plans):
            socket.close(linger=0)
        self._outputs.close(linger=1000)
        self._context.term()

    def _drain(self, socket: "zmq.Socket[bytes]", decode: Callable[[bytes], T], name: str, limit: int) -> Iterator[T]:
        for _ in range(limit):
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode(data)
            except WireError as error:
                self._note_dropped(name, error)
                continue
            yield message

    def _note_dropped(self, name: str, error: WireError) -> None:
        count = self._dropped[name] = self._dropped.get(name, 0) + 1
        level = logging.ERROR if count == 1 else logging.DEBUG
        logger.log(level, "dropped a message on socket %s (number %d): %s", name, count, error)

"""What the scheduler's loop talks through, and its sockets: what comes in decoded, what goes out encoded.

    requests   PULL, bound here        from the frontend: add, abort, flush
    results    PULL, bound here        from the workers: ready, step results
    outputs    PUSH, the frontend binds
    plans-N    PUSH, worker N binds

Bytes that are not a message of their socket cost that message; the first of each socket is logged in full. With a
recorder, everything that the loop acts upon is recorded: messages, orders, turns. `SocketTransport` is made by the
process main, `replay` has one of its own.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import zmq

from common.child import SupervisorLink
from common.config import EngineConfig
from common.errors import WireError
from common.messages import ForChild, ForScheduler, StepResult, WorkerReady, decode_for_scheduler, decode_from_worker
from common.recording import Link, Recorder, receiving, sending
from common.sockets import bind_pull, connect_push, new_context

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Message(Protocol):
    """Anything that can be sent."""

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""


class Transport(Protocol):
    """The other processes, as the loop sees them."""

    def wait(self, timeout_ms: int | None) -> bool:
        """Until something can be read, or the timeout; None waits for ever. True if there is an order to take."""

    def orders(self) -> Sequence[ForChild]:
        """What the supervisor has ordered since the last call."""

    def requests(self, limit: int) -> Iterator[ForScheduler]:
        """At most `limit` messages that have come from the frontend."""

    def results(self, limit: int = 64) -> Iterator[StepResult | WorkerReady]:
        """At most `limit` messages that have come from the workers."""

    def send_out(self, message: Message) -> None:
        """To the frontend."""

    def send_plan(self, message: Message) -> None:
        """To every worker."""


class SocketTransport:
    """The sockets of one scheduler process.

    Args:
        config: names the endpoints.
        link: brings the supervisor's orders; a new one ends a wait.
        recorder: keeps what comes and goes.
    """

    def __init__(self, config: EngineConfig, link: SupervisorLink, recorder: Recorder | None = None) -> None:
        self._link = link
        self._recorder = recorder
        self._context = new_context()
        self._requests = bind_pull(self._context, config.endpoint("requests"))
        self._results = bind_pull(self._context, config.endpoint("results"))
        self._outputs = connect_push(self._context, config.endpoint("outputs"))
        self._plans = [
            connect_push(self._context, config.endpoint(f"plans-{rank}"))
            for rank in range(config.worker.tensor_parallel_size)
        ]
        self._poller = zmq.Poller()
        for readable in (self._requests, self._results, link.wake_fd):
            self._poller.register(readable, zmq.POLLIN)
        self._receive_request = receiving(recorder, Link.REQUESTS, self._requests.recv)
        self._receive_result = receiving(recorder, Link.RESULTS, self._results.recv)
        self._send_out = sending(recorder, Link.OUTPUTS, self._outputs.send)
        self._send_plan = sending(recorder, Link.PLANS, self._broadcast)
        self._dropped: dict[str, int] = {}

    def wait(self, timeout_ms: int | None) -> bool:
        """Until something can be read, or the timeout; None waits for ever. True if there is an order to take."""
        ordered = any(source == self._link.wake_fd for source, _ in self._poller.poll(timeout_ms))
        if self._recorder is not None:
            self._recorder.received(Link.TURN)
        return ordered

    def orders(self) -> Sequence[ForChild]:
        """What the supervisor has ordered since the last call."""
        orders = self._link.take_orders()
        if self._recorder is not None:
            for order in orders:
                self._recorder.received(Link.ORDERS, order.to_wire())
        return orders

    def requests(self, limit: int) -> Iterator[ForScheduler]:
        """At most `limit` messages that have come from the frontend."""
        return self._drain(self._receive_request, decode_for_scheduler, "requests", limit)

    def results(self, limit: int = 64) -> Iterator[StepResult | WorkerReady]:
        """At most `limit` messages that have come from the workers."""
        return self._drain(self._receive_result, decode_from_worker, "results", limit)

    def send_out(self, message: Message) -> None:
        """To the frontend."""
        self._send_out(message.to_wire())

    def send_plan(self, message: Message) -> None:
        """To every worker."""
        self._send_plan(message.to_wire())

    def close(self) -> None:
        """Send what is queued for the frontend, drop the rest."""
        for socket in (self._requests, self._results, *self._plans):
            socket.close(linger=0)
        self._outputs.close(linger=1000)
        self._context.term()

    def _broadcast(self, data: bytes) -> None:
        for socket in self._plans:
            socket.send(data)

    def _drain(self, receive: Callable[..., bytes], decode: Callable[[bytes], T], name: str, limit: int) -> Iterator[T]:
        for _ in range(limit):
            try:
                data = receive(zmq.NOBLOCK)
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

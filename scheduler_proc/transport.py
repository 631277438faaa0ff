"""The scheduler's sockets, as its loop sees them: decoded messages come in, encoded ones go out.

    requests   PULL, bound here        from the frontend: add, abort, flush
    results    PULL, bound here        from the workers: ready, step results, what is unprepared
    outputs    PUSH, the frontend binds
    plans-N    PUSH, worker N binds

No message is lost silently. A request that cannot be read is refused if at least its number can be read; otherwise it
is logged, the first one as an error. A result that cannot be read ends the process, because its requests would wait for
ever. With a recorder, everything that the loop acts upon is recorded: messages, orders, turns. The process main makes a
`SocketTransport`; `replay` has a transport of its own.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgpack
import zmq

from common import busy_poll
from common.child import SupervisorLink
from common.config import EngineConfig
from common.errors import WireError
from common.messages import (
    AddRequest,
    ForChild,
    ForScheduler,
    FromWorker,
    RequestFailed,
    decode_for_scheduler,
    decode_from_worker,
)
from common.recording import Link, Recorder, receiving, sending
from common.sockets import EVENTS, NO_WAIT, READABLE, bind_pull, connect_push, new_context
from common.wire import INT32_MAX

BEGINNING_BYTES = 64
"""Of a message, hold its type code and its number."""

logger = logging.getLogger(__name__)


class Message(Protocol):
    """Anything that can be sent."""

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""


class Transport(Protocol):
    """The other processes, as the loop sees them."""

    def wait(self, timeout_ms: float | None) -> bool:
        """Until something can be read, or the timeout; None waits for ever. True if there is an order to take."""

    def orders(self) -> Sequence[ForChild]:
        """What the supervisor has ordered since the last call."""

    def requests(self, limit: int) -> Iterator[ForScheduler]:
        """At most `limit` messages that have come from the frontend."""

    def results(self, limit: int = 64) -> Iterator[FromWorker]:
        """At most `limit` messages that have come from the workers."""

    def send_out(self, message: Message) -> None:
        """To the frontend."""

    def send_plan(self, message: Message) -> None:
        """To every worker."""

    def reopen(self, session: int) -> None:
        """Talk to a frontend that was started again, in a session of its own; what concerned the old one is dropped."""


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
        self._config = config
        self._results = bind_pull(self._context, config.endpoint("results"))
        self._plans = [
            connect_push(self._context, config.endpoint(f"plans-{rank}"))
            for rank in range(config.worker.tensor_parallel_size)
        ]
        self._poller = zmq.Poller()
        for readable in (self._results, link.wake_fd):
            self._poller.register(readable, zmq.POLLIN)
        self._receive_result = receiving(recorder, Link.RESULTS, self._results.recv)
        self._send_plan = sending(recorder, Link.PLANS, self._broadcast)
        self._readable: set[object] = set()  # sockets and descriptors that had something when `wait` returned
        self._busy = busy_poll.of_engine(config, self._context)
        self._dropped_count = 0
        self._open_frontend_sockets(config.session)

    def _open_frontend_sockets(self, session: int) -> None:
        self._requests = bind_pull(self._context, self._config.endpoint("requests", session))
        self._outputs = connect_push(self._context, self._config.endpoint("outputs", session))
        self._poller.register(self._requests, zmq.POLLIN)
        self._receive_request = receiving(self._recorder, Link.REQUESTS, self._requests.recv)
        self._send_out = sending(self._recorder, Link.OUTPUTS, self._outputs.send)

    def reopen(self, session: int) -> None:
        """Talk to a frontend that was started again, in a session of its own; what concerned the old one is dropped."""
        self._poller.unregister(self._requests)
        self._requests.close(linger=0)
        self._outputs.close(linger=0)
        self._open_frontend_sockets(session)

    def wait(self, timeout_ms: float | None) -> bool:
        """Until something can be read, or the timeout; None waits for ever. True if there is an order to take."""
        self._readable = {source for source, _ in self._busy.poll(self._poller, timeout_ms)}
        if self._requests in self._readable or self._results in self._readable:
            self._busy.note()
        if self._recorder is not None:
            self._recorder.received(Link.TURN)
        return self._link.wake_fd in self._readable

    def orders(self) -> Sequence[ForChild]:
        """What the supervisor has ordered since the last call."""
        orders = self._link.take_orders()
        if self._recorder is not None:
            for order in orders:
                self._recorder.received(Link.ORDERS, order.to_wire())
        return orders

    def requests(self, limit: int) -> Iterator[ForScheduler]:
        """At most `limit` messages that have come from the frontend."""
        if self._requests not in self._readable:
            return
        for data in _waiting(self._requests, self._receive_request, limit):
            try:
                message = decode_for_scheduler(data)
            except WireError as error:
                self._refuse(data, error)
            except MemoryError:
                self._refuse(data, WireError("there is no memory for it"))
            else:
                yield message

    def results(self, limit: int = 64) -> Iterator[FromWorker]:
        """At most `limit` messages that have come from the workers; raises WireError."""
        waiting_limit = limit if self._results in self._readable else 0
        return map(read_result, _waiting(self._results, self._receive_result, waiting_limit))

    def send_out(self, message: Message) -> None:
        """To the frontend."""
        self._send_out(message.to_wire())

    def send_plan(self, message: Message) -> None:
        """To every worker."""
        self._send_plan(message.to_wire())

    def close(self) -> None:
        """Send what is queued for the frontend, drop the rest."""
        self._busy.close()
        for socket in (self._requests, self._results, *self._plans):
            socket.close(linger=0)
        self._outputs.close(linger=1000)
        self._context.term()

    def _broadcast(self, data: bytes) -> None:
        for socket in self._plans:
            socket.send(data)

    def _refuse(self, data: bytes, error: WireError) -> None:
        refusal = refusal_of(data, error)
        if refusal is not None:
            logger.error("refused request %d: %s", refusal.request_id, error)
            self.send_out(refusal)
            return
        self._dropped_count += 1
        level = logging.ERROR if self._dropped_count == 1 else logging.DEBUG
        logger.log(level, "dropped a message on socket requests (number %d): %s", self._dropped_count, error)


def read_result(data: bytes) -> FromWorker:
    """A message from a worker; raises WireError, saying which link it came over."""
    try:
        return decode_from_worker(data)
    except WireError as error:
        raise WireError(f"a message of the worker cannot be read: {error}") from None


def refusal_of(data: bytes, error: WireError) -> RequestFailed | None:
    """The answer to a request that cannot be read; None if it does not even tell its number."""
    code, number = _beginning(data)
    if code != AddRequest.CODE or type(number) is not int or not 0 <= number <= INT32_MAX:
        return None
    text = f"the scheduler cannot read this request: {error}"[:4000]
    return RequestFailed(number, "internal_error", text, status=500)


def _beginning(data: bytes) -> tuple[Any, Any]:
    """A message's type code and first field, whatever follows them; None for what is not there."""
    reader = msgpack.Unpacker()
    try:
        reader.feed(data[:BEGINNING_BYTES])
        return (reader.unpack(), reader.unpack()) if reader.read_array_header() >= 2 else (None, None)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException):
        return None, None


def _waiting(socket: "zmq.Socket[bytes]", receive: Callable[..., bytes], limit: int) -> Iterator[bytes]:
    """At most `limit` messages that are there."""
    for _ in range(limit):
        try:
            data = receive(NO_WAIT)
        except zmq.Again:
            return
        yield data
        if not int(socket.get(EVENTS)) & READABLE:  # costs a quarter of an exception
            return

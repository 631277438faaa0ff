"""Counts the connections to the client socket, and reports when one has ended: a reader of the socket's monitor.

ZeroMQ can neither refuse a connection nor end a single one. So if clients that were refused stay connected until file
descriptors are about to run out, all connections of the client socket are cut: their requests end, and clients that
reconnect are served. Owned by `client_server`.
"""

import asyncio
import contextlib
import logging
import struct
from collections import Counter
from collections.abc import Callable

import zmq

from common.errors import StartupError
from common.sockets import bind_client_endpoint
from frontend.connections import Connections
from frontend.zmq_reader import ZmqReader

_EVENT = struct.Struct("=H")

logger = logging.getLogger(__name__)


class ClientMonitor:
    """Watches a client socket.

    Args:
        socket: bound to one endpoint, and with keys first to a local ipc one, which is never cut.
        connections: counted here.
        on_disconnect: called after connections have ended.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", connections: Connections, on_disconnect: Callable[[], None]
    ) -> None:
        self._socket = socket
        self._endpoint = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._connections = connections
        self._on_disconnect = on_disconnect
        # by transport: events may name another address than the one that is bound
        self._counts: Counter[bytes] = Counter()
        self._someone_left = False
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        self._monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._reader = ZmqReader(self._monitor, self._on_event, self._after_events)

    def close(self) -> None:
        """Stop watching; the socket is the caller's to close."""
        self._reader.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def catch_up(self) -> None:
        """Count what has happened by now: whoever has read a message may not have read yet that its sender came."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._on_event(self._monitor.recv_multipart(zmq.NOBLOCK))
        self._loop.call_soon(self._after_events)

    def _on_event(self, frames: list[bytes]) -> None:
        number = _EVENT.unpack_from(frames[0])[0]
        if number == zmq.EVENT_ACCEPTED:
            self._count(frames[1], 1)
        elif number == zmq.EVENT_DISCONNECTED:
            self._count(frames[1], -1)
            self._someone_left = True
        elif not self._is_open:
            self._open()

    def _count(self, endpoint: bytes, change: int) -> None:
        self._counts[endpoint.partition(b":")[0]] += change
        self._connections.client_count += change

    def _after_events(self) -> None:
        if self._monitor.closed:
            return
        if self._someone_left:
            self._someone_left = False
            self._on_disconnect()
        if self._is_open and self._connections.excess > self._connections.tolerance:
            self._cut()

    def _cut(self) -> None:
        """End all connections: ZeroMQ does so when an endpoint is unbound."""
        logger.error(
            "%d connections to the client socket and %d over HTTP: cutting the former, before file descriptors run out",
            self._connections.client_count,
            self._connections.http_count,
        )
        self._is_open = False
        self._socket.unbind(self._endpoint)

    def _open(self) -> None:
        """Accept connections again; by now the old listener is closed and its file removed."""
        transport = self._endpoint.partition(":")[0].encode()
        self._connections.client_count -= self._counts.pop(transport, 0)
        self._someone_left = True
        try:
            bind_client_endpoint(self._socket, self._endpoint)
            self._is_open = True
        except StartupError as error:
            logger.error("the client socket stays closed: %s", error)

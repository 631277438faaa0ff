"""Reads messages from a ZeroMQ socket on an asyncio loop, through the socket's file descriptor.

One message costs about a microsecond this way, and about eighteen through `zmq.asyncio`. The descriptor is
edge-triggered: after it has woken us, or after anything was sent on the same socket, messages may wait without another
wake-up. So `drain` reads until the socket is empty (in slices, so that nothing else on the loop starves), and whoever
sends on the socket calls `recheck` afterwards.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from common.sockets import EVENTS, NO_WAIT, READABLE

SLICE_LIMIT = 32
"""Messages read before other work on the loop gets its turn."""


class ZmqReader:
    """Reads a socket until `close`.

    Args:
        socket: read by nobody else.
        handle: takes the frames of each message, as a list; what it raises goes to the loop, and reading
            goes on after it.
        after_slice: called after each run of messages.
        copy: hand over bytes; without it, `zmq.Frame` objects, which know more about where they came from.
        one_frame: every message has one frame, and its bytes are handed over by themselves.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        handle: Callable[[Any], None],
        after_slice: Callable[[], None] = lambda: None,
        *,
        copy: bool = True,
        one_frame: bool = False,
    ) -> None:
        self._socket = socket
        self._handle = handle
        self._after_slice = after_slice
        self._receive: Callable[[], Any] = (
            partial(socket.recv, NO_WAIT) if one_frame else partial(socket.recv_multipart, NO_WAIT, copy)
        )
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.get(zmq.FD))
        self._scheduled = False
        self._closed = False
        self._loop.add_reader(self._fd, self.drain)
        self.recheck()

    def drain(self) -> bool:
        """Read what waits, up to a slice of it; whether there may be more."""
        self._scheduled = False
        if self._closed:
            return False
        more = True
        try:
            for _ in range(SLICE_LIMIT):
                self._handle(self._receive())
                if not int(self._socket.get(EVENTS)) & READABLE:  # costs half of an exception
                    more = False
                    break
        except zmq.Again:
            more = False
        finally:
            if more:  # also when a message could not be handled: the rest would wait without a wake-up
                self._schedule()
            self._after_slice()
        return more

    def recheck(self) -> None:
        """Look for messages that came without a wake-up."""
        if not self._scheduled and not self._closed and int(self._socket.get(EVENTS)) & READABLE:
            self._schedule()

    def close(self) -> None:
        """Stop reading; the socket is the caller's to close."""
        self._closed = True
        self._loop.remove_reader(self._fd)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.drain)
